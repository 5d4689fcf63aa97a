"""Log-likelihood of a continuation: exact, by Monte Carlo over maskings, or by the chain rule.

For a continuation x of L tokens after a context:

- "exact": log p(x) of causal models, from one forward.
- "monte_carlo": the lower bound on log p(x) that masked models are trained with (LLaDA, arXiv 2502.09992, equation 6
  and `get_log_likelihood`): l ~ uniform{1, ..., L} positions, chosen uniformly, are masked;

      E[ (L / l) sum over the masked i of log p(x_i | the rest) ]

- "chain": sum of log p(x_i | positions before i in an order, the others masked): the log-likelihood of decoding in that
  order. Its mean over all orders is the expectation above.

For block-causal models the value is the sum over blocks, each given the earlier blocks. Positions of the last block
after the continuation's end stay masked.

Difference from LLaDA's code: it rounds fractional l by `torch.round` (halves to even), which for some L favours even l.
Here every l is equally likely. If a continuation has at most `samples` maskings, each of them is evaluated once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.api.generate import generate
from paradec.core import rng
from paradec.core.checks import check_choice, check_int, check_model
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import build_rows_query
from paradec.core.logprobs import StepLogProbs
from paradec.core.prompts import check_rows
from paradec.core.protocol import NotFinite
from paradec.core.query import WindowLogits
from paradec.request import FIELDS
from paradec.samplers.distributions import apply_guidance
from paradec.samplers.start import row_keys


@dataclass(frozen=True)
class Masking:
    """One row to evaluate."""

    tokens: list[int]
    positions: list[int]
    """Positions of `tokens` whose log-probabilities are summed."""
    ids: list[int]
    """The continuation's ids at these positions."""
    context: int
    """Number of tokens before the continuation."""
    weight: float
    stratum: int
    """Index of a stratum; the weighted values of a stratum sum to one estimate."""


@dataclass(frozen=True)
class MaskingSpan:
    """Maskings of a span: a continuation, or for a block-causal model its part in one block."""

    rows: list[Masking]
    samples: int
    """Number of maskings or orders."""
    drawn: bool
    """Whether maskings or orders were drawn at random."""


@dataclass(frozen=True)
class _Span:
    """Positions [begin, end) of the continuation, evaluated in rows of `width` tokens."""

    begin: int
    end: int
    width: int


def chain_maskings(
    facts: ModelFacts, context: list[int], continuation: list[int], order: str, samples: int, seed: int
) -> list[MaskingSpan]:
    """Build a row for each position of each order: earlier positions of the order are visible, the others masked."""
    row, parts = context + continuation, []
    keys = _keys(seed, row)
    for span in _spans(facts, len(context), len(continuation)):
        is_random = order == "random" and span.end - span.begin > 1
        if is_random:
            orders = span.begin + _uniform_scores(keys, span, samples).argsort(axis=1, kind="stable")
        else:
            positions = np.arange(span.begin, span.end)
            orders = (positions[::-1] if order == "right_to_left" else positions)[None]
        rows = [
            _masking(row, facts, span, len(context), positions_in_order[k:], [position], 1.0, stratum)
            for stratum, positions_in_order in enumerate(orders.tolist())
            for k, position in enumerate(positions_in_order)
        ]
        parts.append(MaskingSpan(rows, len(orders), is_random))
    return parts


def random_maskings(
    facts: ModelFacts, context: list[int], continuation: list[int], samples: int, stratum: int, seed: int
) -> list[MaskingSpan]:
    """Draw random maskings, in strata of `stratum` maskings with evenly spread numbers of masks. If there are at most
    `samples` maskings, list all instead."""
    row, parts = context + continuation, []
    keys = _keys(seed, row)
    for span in _spans(facts, len(context), len(continuation)):
        length = span.end - span.begin
        is_exhaustive = length < samples.bit_length() + 1 and 2**length - 1 <= samples
        chosen: list[tuple[Sequence[int], float, int]] = []
        if is_exhaustive:
            for size in range(1, length + 1):
                # L / size is the estimate's weight; each size has probability 1 / L, divided evenly among its subsets
                weight = 1 / (size * math.comb(length, size))
                subsets = itertools.combinations(range(span.begin, span.end), size)
                chosen += [(subset, weight, 0) for subset in subsets]
        else:
            per_stratum = min(stratum, samples)
            sizes = _mask_counts(keys, span.begin, length, samples, per_stratum)
            ranks = _uniform_scores(keys, span, samples).argsort(axis=1, kind="stable")
            for index, (size, ranked) in enumerate(zip(sizes, ranks, strict=True)):
                positions = sorted((span.begin + ranked[:size]).tolist())
                chosen.append((positions, length / (size * per_stratum), index // per_stratum))
        rows = [
            _masking(row, facts, span, len(context), positions, positions, weight, index)
            for positions, weight, index in chosen
        ]
        parts.append(MaskingSpan(rows, len(rows), not is_exhaustive))
    return parts


def _spans(facts: ModelFacts, context: int, length: int) -> list[_Span]:
    stop, block = context + length, facts.block_length
    if facts.topology != "block_causal" or block is None:
        return [_Span(context, stop, stop)]
    first = context if facts.prompt_aligned else 0
    cuts = [context, *range(context + block - (context - first) % block, stop, block), stop]
    longest = facts.max_length or stop + block
    return [_Span(a, b, min(first - (first - b) // block * block, longest)) for a, b in itertools.pairwise(cuts)]


def _masking(
    row: list[int],
    facts: ModelFacts,
    span: _Span,
    context: int,
    hidden: Sequence[int],
    targets: Sequence[int],
    weight: float,
    stratum: int,
) -> Masking:
    """Build a row of the span's width, with masks at `hidden` and after the span's end; its targets are `targets`."""
    tokens = row[: span.end] + [facts.mask_id] * (span.width - span.end)
    for position in hidden:
        tokens[position] = facts.mask_id
    return Masking(tokens, [*targets], [row[position] for position in targets], context, weight, stratum)


def _keys(seed: int, row: list[int]) -> Tensor:
    return torch.as_tensor(row_keys([seed], [row]))


def _uniform_scores(keys: Tensor, span: _Span, samples: int) -> np.ndarray:
    """[samples, L] uniform draws; sorting a row of them gives a random order of the positions."""
    positions = torch.arange(span.begin, span.end).expand(samples, -1)
    uniform = rng.uniform(keys.expand(samples, -1), torch.arange(samples), positions, 1, rng.POSITION_STREAM)
    return uniform.squeeze(-1).numpy()


def _mask_counts(keys: Tensor, start: int, length: int, samples: int, stratum: int) -> list[int]:
    """Number of masked positions of each masking: uniform on 1 to L, and spread evenly within a stratum."""
    strata = samples // stratum
    position = torch.full((strata, 1), start)
    first = rng.uniform(keys.expand(strata, -1), torch.arange(strata), position, 1, rng.TOKEN_STREAM).view(strata)
    offsets = (first * length).long().clamp(max=length - 1)
    steps = torch.arange(stratum) * length // stratum
    return ((offsets.unsqueeze(1) + steps) % length + 1).flatten().tolist()


METHODS = ("exact", "monte_carlo", "chain")
ORDERS = ("left_to_right", "right_to_left", "random")
SUPPORTED_KINDS = ("text",)
"""Supported kinds of models (of `paradec.core.checks.MODELS`)."""
MAX_SAMPLES = 2**20

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of the context, and of the continuation."""


@dataclass(frozen=True)
class Likelihood:
    """A log-likelihood, or an estimate of one."""

    value: float
    """In nats."""
    variance: float
    """Variance of `value` as an estimate: 0 if nothing was drawn, NaN for a single draw."""
    samples: int
    """Number of maskings or orders that `value` averages; 1 if it is exact."""
    forwards: int
    """Number of rows evaluated (under guidance, each counts twice)."""
    greedy: bool | None = None
    """Whether every token of the continuation was the likeliest one; None for masked models."""

    @property
    def error(self) -> float:
        """Standard error of `value`."""
        return math.sqrt(self.variance)


def log_likelihoods(
    model: Any,
    pairs: Sequence[Pair],
    *,
    method: str | None = None,
    samples: int = 128,
    stratum: int = 16,
    order: str = "left_to_right",
    guidance_scale: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
) -> Iterator[Likelihood]:
    """Yield the log-likelihoods of continuations, in the order of the pairs.

    Up to rounding, a value depends only on its ids, the seed and the settings, not on the batch size.

    Args:
        model: a language model, masked or causal.
        pairs: (context, continuation) as ids. Masked models without a shift also accept an empty context.
        method: of `METHODS`; None is "exact" for causal models and "monte_carlo" for masked ones.
        samples: maskings of "monte_carlo" (128 is LLaDA's), and orders of "chain" with order "random".
        stratum: number of maskings whose l are spread evenly over 1 to L (16 is LLaDA's batch); `samples` must be a
            multiple of it, or smaller. The variance is that of the strata's means.
        order: of "chain".
        guidance_scale: as in `paradec.Request` (LLaDA's cfg + 1); the second branch has a masked context.
        seed: of the draws. batch_size: rows evaluated together.

    Raises:
        ValueError, TypeError: an argument out of its range, before any forward.
        FloatingPointError: NaN or +inf among the logits.
    """
    check_model("log_likelihoods", model, SUPPORTED_KINDS)
    facts: ModelFacts = model.facts
    if facts.topology == "causal_context":
        raise ValueError(f"{facts.name} has a likelihood only as a causal model: load it with topology='causal'")
    causal = facts.topology == "causal"
    method = ("exact" if causal else "monte_carlo") if method is None else method
    check_choice("method", method, METHODS)
    if causal != (method == "exact"):
        kind = "causal" if causal else "masked"
        allowed = "exact" if causal else "monte_carlo or chain"
        raise ValueError(f"method={method!r} is not for {facts.name}, a {kind} model: give {allowed}")
    check_choice("order", order, ORDERS)
    check_int("samples", samples, low=1, high=MAX_SAMPLES)
    check_int("stratum", stratum, low=1)
    if samples % min(stratum, samples):
        raise ValueError(f"samples={samples} must be a multiple of stratum={stratum}, or smaller")
    FIELDS["guidance_scale"].metadata["check"]("guidance_scale", guidance_scale)
    if causal and guidance_scale != 1:
        raise ValueError(f"guidance_scale={guidance_scale} needs a mask token; {facts.name} is causal")
    check_int("seed", seed, low=0, high=2**63 - 1)
    check_int("batch_size", batch_size, low=1)
    for index, pair in enumerate(pairs):
        _check_pair(model, index, pair)

    def build_spans(pair: Pair) -> list[MaskingSpan]:
        context, continuation = list(map(int, pair[0])), list(map(int, pair[1]))
        if method == "exact":
            # one row: a causal model predicts every position from the tokens before it
            row, start = context + continuation, len(context)
            return [MaskingSpan([Masking(row, [*range(start, len(row))], continuation, start, 1.0, 0)], 1, False)]
        if method == "chain":
            return chain_maskings(facts, context, continuation, order, samples, seed)
        return random_maskings(facts, context, continuation, samples, stratum, seed)

    return _evaluate_pairs(model, [*pairs], build_spans, guidance_scale, batch_size)


def _check_pair(model: Any, index: int, pair: Pair) -> None:
    """Raise ValueError for a pair without a likelihood on this model."""
    context, continuation = pair
    if isinstance(context, str) or isinstance(continuation, str):
        ids = "model.tokenizer(text, add_special_tokens=False)['input_ids']"
        raise TypeError(f"pair {index} must have ids, not texts: give {ids}")
    facts = model.facts
    if not len(continuation):
        raise ValueError(f"continuation {index} is empty; give at least one token")
    if not len(context) and facts.topology == "causal":
        raise ValueError(f"context {index} is empty; {facts.name} needs at least one token")
    if not len(context) and facts.shift:
        raise ValueError(f"context {index} is empty; {facts.name} predicts each token from the previous one")
    row = [int(token) for token in (*context, *continuation)]
    check_rows(model, [row])
    if facts.mask_token_id is not None and facts.mask_token_id in row:
        raise ValueError(f"pair {index} holds the mask id {facts.mask_token_id} at {row.index(facts.mask_token_id)}")
    facts.check_length(len(row), len(continuation))


# Evaluation ----------------------------------------------------------------------------------------------------------


def _evaluate_pairs(
    model: Any, pairs: list[Pair], build_spans: Callable[[Pair], list[MaskingSpan]], scale: float, batch_size: int
) -> Iterator[Likelihood]:
    """Evaluate the rows of all pairs in batches of `batch_size`, which may mix pairs."""
    plans: list[list[MaskingSpan]] = []
    sums: list[list[np.ndarray]] = []
    """The strata's values, for each pair and each of its parts."""
    greedy, remaining, num_done = [True] * len(pairs), [0] * len(pairs), 0

    def rows() -> Iterator[tuple[int, int, Masking]]:
        for index, pair in enumerate(pairs):
            plans.append(build_spans(pair))
            sums.append([np.zeros(part.rows[-1].stratum + 1) for part in plans[-1]])
            remaining[index] = sum(len(part.rows) for part in plans[-1])
            yield from ((index, part_index, row) for part_index, part in enumerate(plans[-1]) for row in part.rows)

    source = rows()
    while batch := list(itertools.islice(source, batch_size)):
        log_probs = _log_probs(model, [row for *_, row in batch], scale)
        for (index, part_index, row), (value, is_best) in zip(batch, log_probs, strict=True):
            sums[index][part_index][row.stratum] += row.weight * value
            greedy[index] &= is_best
            remaining[index] -= 1
        while num_done < len(plans) and remaining[num_done] == 0:
            yield _likelihood(model, plans[num_done], sums[num_done], greedy[num_done], scale)
            plans[num_done], sums[num_done] = [], []  # free memory: thousands of pairs have millions of rows
            num_done += 1


def _likelihood(model: Any, parts: list[MaskingSpan], sums: list[np.ndarray], greedy: bool, scale: float) -> Likelihood:
    value, variance = 0.0, 0.0
    for part, strata in zip(parts, sums, strict=True):
        value += float(strata.mean())
        if part.drawn:
            variance += float(strata.var(ddof=1)) / len(strata) if len(strata) > 1 else math.nan
    rows = sum(len(part.rows) for part in parts) * (1 if scale == 1 else 2)
    causal = model.facts.topology == "causal"
    return Likelihood(value, variance, max(part.samples for part in parts), rows, greedy if causal else None)


def _log_probs(model: Any, rows: list[Masking], scale: float) -> list[tuple[float, bool]]:
    """For each row: the sum of the log-probabilities of its ids, and whether each id was the likeliest token."""
    results: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
    buckets: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        buckets.setdefault(0 if model.pads else len(row.tokens), []).append(index)
    for bucket in buckets.values():
        for index, result in zip(bucket, _bucket_log_probs(model, [rows[i] for i in bucket], scale), strict=True):
            results[index] = result
    return results


def _bucket_log_probs(model: Any, rows: list[Masking], scale: float) -> list[tuple[float, bool]]:
    """Compute `_log_probs` of rows that fit into one call, padded on the right."""
    facts, max_targets = model.facts, max(len(row.positions) for row in rows)
    ids = torch.zeros(len(rows), max_targets, dtype=torch.int64)
    targets = torch.zeros_like(ids, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, : len(row.positions)] = torch.tensor(row.ids)
        targets[index, : len(row.positions)] = True
    branches = 1 if scale == 1 else 2
    unconditional = [] if branches == 1 else [[facts.mask_id] * row.context + row.tokens[row.context :] for row in rows]
    branch_rows = rows * branches
    query = build_rows_query(
        model,
        [row.tokens for row in rows] + unconditional,
        [row.positions for row in branch_rows],
        [row.context for row in branch_rows],
    )
    query = query.with_fields(
        rows=np.arange(len(rows)),
        window=WindowLogits(np.arange(len(rows))),
        branches=branches,
        forwarded=np.array([len(row.tokens) for row in rows]),
    )
    with torch.inference_mode():
        logits = model(query)
        logits = logits if branches == 1 else apply_guidance(logits, scale)
        log_probs = StepLogProbs.from_logits(logits, ids.to(model.device), 1)
        chosen, is_best = log_probs.chosen.cpu(), (log_probs.best_tokens.squeeze(-1).cpu() == ids)
    wrong = (log_probs.best.squeeze(-1).cpu().isnan() & targets).any(1).nonzero().flatten().numpy()
    if len(wrong):
        raise NotFinite(f"{facts.name} returned NaN or +inf for a row of {len(rows[wrong[0]].tokens)} tokens", wrong)
    total = torch.where(targets, chosen, 0.0).sum(1).tolist()
    return list(zip(total, (is_best | ~targets).all(1).tolist(), strict=True))


def check_greedy_decoding(
    model: Any, pairs: Sequence[Pair], *, guidance_scale: float = 1.0, batch_size: int = 16
) -> list[bool]:
    """For each pair, whether a masked model's greedy answer is the continuation: one token per forward, chosen by
    confidence (LLaDA's `suffix_greedy_prediction`). End tokens do not end the answer. Raises ValueError, TypeError: as
    `log_likelihoods`, or for a causal model (use `Likelihood.greedy`)."""
    check_model("check_greedy_decoding", model, SUPPORTED_KINDS)
    if model.facts.topology == "causal":
        raise ValueError(f"{model.facts.name} is causal: use `greedy` in the results of log_likelihoods")
    for index, pair in enumerate(pairs):
        _check_pair(model, index, pair)
    is_greedy = [False] * len(pairs)
    by_length: dict[int, list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise ValueError(f"context {index} is empty; greedy decoding needs at least one token")
        by_length.setdefault(len(continuation), []).append(index)
    blocks = None if model.facts.topology == "block_causal" else "whole"
    for length, indices in by_length.items():
        for first in range(0, len(indices), batch_size):
            part = indices[first : first + batch_size]
            output = generate(
                model,
                input_ids=[list(map(int, pairs[index][0])) for index in part],
                sampler="low_confidence",
                max_new_tokens=length,
                blocks=blocks,
                eos_early_stop=False,
                guidance_scale=guidance_scale,
            )
            for index, ids in zip(part, output.new_tokens.tolist(), strict=True):
                is_greedy[index] = ids == list(map(int, pairs[index][1]))
    return is_greedy
