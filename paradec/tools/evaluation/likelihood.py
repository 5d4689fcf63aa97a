"""Log-likelihood of a continuation: exact, by Monte Carlo over maskings, or by the chain rule.

For a continuation x of L tokens after a context:

- "exact": log p(x) of causal models, from one forward.
- "monte_carlo": the lower bound on log p(x) that masked models are trained with (LLaDA, arXiv 2502.09992, equation 6
  and `get_log_likelihood`). A masking is a random subset of positions: its size l is uniform on 1, ..., L. The bound is

      E[ (L / l) sum over the masked positions i of log p(x_i | context and unmasked positions) ]

- "chain": for an order of the positions, the sum over i of log p(x_i | context and positions before i in the order).
  This is the log-likelihood of decoding in this order. Its mean over all orders is the bound above.

For block-causal models the value is the sum over blocks, each conditioned on the earlier blocks. Positions of the last
block after the continuation's end stay masked.

Difference from LLaDA's code: LLaDA rounds fractional l by `torch.round` (halves to even), which for some L favours even
l. Here every l is equally likely. If a continuation has at most `samples` maskings, each is evaluated exactly once.
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
    """A partly masked row: one row of a forward."""

    tokens: list[int]
    positions: list[int]
    """Positions of `tokens` whose log-probabilities are summed."""
    targets: list[int]
    """The continuation's ids at `positions`."""
    num_context: int
    """Number of tokens before the continuation."""
    weight: float
    stratum_index: int
    """Index of the row's stratum. The weighted sums of all rows of a stratum add up to one estimate."""


@dataclass(frozen=True)
class SpanMaskings:
    """Maskings of a span. The span is the continuation, or for a block-causal model its part in one block."""

    rows: list[Masking]
    num_samples: int
    """Number of maskings or orders."""
    is_random: bool
    """Whether maskings or orders were drawn at random."""


@dataclass(frozen=True)
class _Span:
    """Positions [begin, end) of the row (context and continuation), evaluated in rows of `width` tokens."""

    begin: int
    end: int
    width: int


def build_chain_maskings(
    facts: ModelFacts, context: list[int], continuation: list[int], order: str, num_orders: int, seed: int
) -> list[SpanMaskings]:
    """Build a masking for each position of each order: this position and the order's later positions are masked."""
    row, maskings = context + continuation, []
    key = _row_key(seed, row)
    for span in _split_spans(facts, len(context), len(continuation)):
        is_random = order == "random" and span.end - span.begin > 1
        if is_random:
            orders = span.begin + _uniform_scores(key, span, num_orders).argsort(axis=1, kind="stable")
        else:
            positions = np.arange(span.begin, span.end)
            orders = (positions[::-1] if order == "right_to_left" else positions)[None]
        rows = [
            _build_masking(row, facts, span, len(context), positions_in_order[k:], [position], 1.0, order_index)
            for order_index, positions_in_order in enumerate(orders.tolist())
            for k, position in enumerate(positions_in_order)
        ]
        maskings.append(SpanMaskings(rows, len(orders), is_random))
    return maskings


def draw_maskings(
    facts: ModelFacts, context: list[int], continuation: list[int], samples: int, stratum: int, seed: int
) -> list[SpanMaskings]:
    """Draw `samples` maskings of each span, in strata of `stratum` maskings whose sizes are spread evenly. A span with
    at most `samples` possible maskings gets all of them instead."""
    row, maskings = context + continuation, []
    key = _row_key(seed, row)
    for span in _split_spans(facts, len(context), len(continuation)):
        length = span.end - span.begin
        is_exhaustive = length < samples.bit_length() + 1 and 2**length - 1 <= samples
        chosen: list[tuple[Sequence[int], float, int]] = []  # positions, weight, index of the stratum
        if is_exhaustive:
            for size in range(1, length + 1):
                # weight L / size, times the subset's probability: 1 / L for its size, 1 / C(L, size) within the size
                weight = 1 / (size * math.comb(length, size))
                subsets = itertools.combinations(range(span.begin, span.end), size)
                chosen += [(subset, weight, 0) for subset in subsets]
        else:
            stratum_size = min(stratum, samples)
            sizes = _draw_sizes(key, span.begin, length, samples, stratum_size)
            orders = _uniform_scores(key, span, samples).argsort(axis=1, kind="stable")
            for index, (size, order) in enumerate(zip(sizes, orders, strict=True)):
                positions = sorted((span.begin + order[:size]).tolist())
                chosen.append((positions, length / (size * stratum_size), index // stratum_size))
        rows = [
            _build_masking(row, facts, span, len(context), positions, positions, weight, stratum_index)
            for positions, weight, stratum_index in chosen
        ]
        maskings.append(SpanMaskings(rows, len(rows), not is_exhaustive))
    return maskings


def _split_spans(facts: ModelFacts, num_context: int, length: int) -> list[_Span]:
    """Split the continuation, of `length` tokens, at the block boundaries of a block-causal model."""
    stop, block = num_context + length, facts.block_length
    if facts.topology != "block_causal" or block is None:
        return [_Span(num_context, stop, stop)]
    first_block = num_context if facts.prompt_aligned else 0
    cuts = [num_context, *range(num_context + block - (num_context - first_block) % block, stop, block), stop]
    longest = facts.max_length or stop + block
    widths = [min(first_block - (first_block - end) // block * block, longest) for end in cuts[1:]]
    return [_Span(*span) for span in zip(cuts, cuts[1:], widths)]


def _build_masking(
    row: list[int],
    facts: ModelFacts,
    span: _Span,
    num_context: int,
    masked: Sequence[int],
    positions: Sequence[int],
    weight: float,
    stratum_index: int,
) -> Masking:
    """Build a masking of the span's width, with masks at the positions `masked` and after the span's end."""
    tokens = row[: span.end] + [facts.mask_id] * (span.width - span.end)
    for position in masked:
        tokens[position] = facts.mask_id
    return Masking(tokens, [*positions], [row[i] for i in positions], num_context, weight, stratum_index)


def _row_key(seed: int, row: list[int]) -> Tensor:
    return torch.as_tensor(row_keys([seed], [row]))


def _uniform_scores(key: Tensor, span: _Span, samples: int) -> np.ndarray:
    """Draw uniform numbers [samples, L] for the span's L positions. Sorting a row gives a random order."""
    positions = torch.arange(span.begin, span.end).expand(samples, -1)
    uniform = rng.uniform(key.expand(samples, -1), torch.arange(samples), positions, 1, rng.POSITION_STREAM)
    return uniform.squeeze(-1).numpy()


def _draw_sizes(key: Tensor, start: int, length: int, samples: int, stratum_size: int) -> list[int]:
    """Draw the number of masked positions of each masking: uniform on 1 to `length`, evenly spread in each stratum."""
    num_strata = samples // stratum_size
    position = torch.full((num_strata, 1), start)
    draws = rng.uniform(key.expand(num_strata, -1), torch.arange(num_strata), position, 1, rng.TOKEN_STREAM)
    offsets = (draws.view(num_strata) * length).long().clamp(max=length - 1)
    steps = torch.arange(stratum_size) * length // stratum_size
    return ((offsets.unsqueeze(1) + steps) % length + 1).flatten().tolist()


METHODS = ("exact", "monte_carlo", "chain")
ORDERS = ("left_to_right", "right_to_left", "random")
SUPPORTED_KINDS = ("text",)
"""Kinds of models that have a likelihood (names in `paradec.core.checks.MODELS`)."""
MAX_SAMPLES = 2**20

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of the context, and of the continuation."""


@dataclass(frozen=True)
class Likelihood:
    """A log-likelihood, or an estimate of it."""

    value: float
    """In nats."""
    variance: float
    """Variance of the estimate `value`: 0 if nothing was random, NaN if there was a single stratum or order."""
    samples: int
    """Number of maskings or orders that `value` averages; 1 if it is exact."""
    forwards: int
    """Number of rows evaluated. With guidance, each row counts twice."""
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

    Up to rounding, a value depends on its pair, the seed and the settings, but not on other pairs or the batch size.

    Args:
        model: a language model, masked or causal.
        pairs: (context, continuation) as ids. Masked models without shifted logits also accept an empty context.
        method: one of `METHODS`; None is "exact" for causal models and "monte_carlo" for masked models.
        samples: number of maskings of "monte_carlo" (LLaDA: 128), or of orders of "chain" with order "random".
        stratum: number of maskings whose l are spread evenly over 1 to L (LLaDA: 16, its batch size). `samples` must be
            a multiple of it, or smaller. `Likelihood.variance` is computed from the estimates of the strata.
        order: one of `ORDERS`, for "chain".
        guidance_scale: as in `paradec.Request` (LLaDA's cfg + 1). The unconditional branch has a masked context.
        seed: seed of the random maskings and orders. batch_size: number of rows evaluated together.

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

    def build_maskings(pair: Pair) -> list[SpanMaskings]:
        context, continuation = list(map(int, pair[0])), list(map(int, pair[1]))
        if method == "exact":
            # one row: a causal model predicts every position from the tokens before it
            row, start = context + continuation, len(context)
            return [SpanMaskings([Masking(row, [*range(start, len(row))], continuation, start, 1.0, 0)], 1, False)]
        if method == "chain":
            return build_chain_maskings(facts, context, continuation, order, samples, seed)
        return draw_maskings(facts, context, continuation, samples, stratum, seed)

    return _evaluate_pairs(model, [*pairs], build_maskings, guidance_scale, batch_size)


def _check_pair(model: Any, index: int, pair: Pair) -> None:
    """Raise ValueError or TypeError if the model has no likelihood of the pair."""
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
    model: Any, pairs: list[Pair], build_maskings: Callable[[Pair], list[SpanMaskings]], scale: float, batch_size: int
) -> Iterator[Likelihood]:
    """Evaluate the rows of all pairs in batches of `batch_size`. A batch may contain rows of several pairs."""
    maskings: list[list[SpanMaskings]] = []
    estimates: list[list[np.ndarray]] = []
    """For each pair and span: the estimates of the strata."""
    is_greedy, num_remaining, num_done = [True] * len(pairs), [0] * len(pairs), 0

    def generate_rows() -> Iterator[tuple[int, int, Masking]]:
        for pair_index, pair in enumerate(pairs):
            spans = build_maskings(pair)
            maskings.append(spans)
            estimates.append([np.zeros(span.rows[-1].stratum_index + 1) for span in spans])
            num_remaining[pair_index] = sum(len(span.rows) for span in spans)
            yield from ((pair_index, span_index, row) for span_index, span in enumerate(spans) for row in span.rows)

    rows = generate_rows()
    while batch := list(itertools.islice(rows, batch_size)):
        log_probs = _sum_log_probs(model, [row for *_, row in batch], scale)
        for (pair_index, span_index, row), (value, is_likeliest) in zip(batch, log_probs, strict=True):
            estimates[pair_index][span_index][row.stratum_index] += row.weight * value
            is_greedy[pair_index] &= is_likeliest
            num_remaining[pair_index] -= 1
        while num_done < len(maskings) and num_remaining[num_done] == 0:
            yield _build_likelihood(model, maskings[num_done], estimates[num_done], is_greedy[num_done], scale)
            maskings[num_done], estimates[num_done] = [], []  # free memory: thousands of pairs have millions of rows
            num_done += 1


def _build_likelihood(
    model: Any, spans: list[SpanMaskings], estimates: list[np.ndarray], greedy: bool, scale: float
) -> Likelihood:
    value, variance = 0.0, 0.0
    for span, strata in zip(spans, estimates, strict=True):
        value += float(strata.mean())
        if span.is_random:
            variance += float(strata.var(ddof=1)) / len(strata) if len(strata) > 1 else math.nan
    num_rows = sum(len(span.rows) for span in spans) * (1 if scale == 1 else 2)
    num_samples = max(span.num_samples for span in spans)
    return Likelihood(value, variance, num_samples, num_rows, greedy if model.facts.topology == "causal" else None)


def _sum_log_probs(model: Any, rows: list[Masking], scale: float) -> list[tuple[float, bool]]:
    """Compute for each row the sum of its targets' log-probabilities, and whether all were the likeliest tokens."""
    results: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
    buckets: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        buckets.setdefault(0 if model.pads else len(row.tokens), []).append(index)
    for bucket in buckets.values():
        for index, result in zip(bucket, _sum_padded_log_probs(model, [rows[i] for i in bucket], scale), strict=True):
            results[index] = result
    return results


def _sum_padded_log_probs(model: Any, rows: list[Masking], scale: float) -> list[tuple[float, bool]]:
    """Compute `_sum_log_probs` in one call of the model. The rows are padded on the right."""
    facts, max_targets = model.facts, max(len(row.positions) for row in rows)
    targets = torch.zeros(len(rows), max_targets, dtype=torch.int64)
    is_target = torch.zeros_like(targets, dtype=torch.bool)
    for index, row in enumerate(rows):
        targets[index, : len(row.positions)] = torch.tensor(row.targets)
        is_target[index, : len(row.positions)] = True
    branches, tokens = 1, [row.tokens for row in rows]
    if scale != 1:  # guidance: the unconditional branch has masked contexts
        branches = 2
        tokens += [[facts.mask_id] * row.num_context + row.tokens[row.num_context :] for row in rows]
    positions, context_lengths = [row.positions for row in rows], [row.num_context for row in rows]
    query = build_rows_query(model, tokens, positions * branches, context_lengths * branches)
    query = query.with_fields(
        rows=np.arange(len(rows)),
        window=WindowLogits(np.arange(len(rows))),
        branches=branches,
        forwarded=np.array([len(row.tokens) for row in rows]),
    )
    with torch.inference_mode():
        logits = model(query)
        logits = logits if branches == 1 else apply_guidance(logits, scale)
        log_probs = StepLogProbs.from_logits(logits, targets.to(model.device), 1)
        chosen, is_likeliest = log_probs.chosen.cpu(), (log_probs.best_tokens.squeeze(-1).cpu() == targets)
    failed = (log_probs.best.squeeze(-1).cpu().isnan() & is_target).any(1).nonzero().flatten().numpy()
    if len(failed):
        raise NotFinite(f"{facts.name} returned NaN or +inf for a row of {len(rows[failed[0]].tokens)} tokens", failed)
    sums = torch.where(is_target, chosen, 0.0).sum(1).tolist()
    return list(zip(sums, (is_likeliest | ~is_target).all(1).tolist(), strict=True))


def check_greedy_decoding(
    model: Any, pairs: Sequence[Pair], *, guidance_scale: float = 1.0, batch_size: int = 16
) -> list[bool]:
    """For each pair, check whether a masked model's greedy answer to the context is the continuation.

    Each forward decodes the most confident position (LLaDA's `suffix_greedy_prediction`). End tokens do not end the
    answer. Raises the ValueErrors and TypeErrors of `log_likelihoods`; ValueError: causal models, empty contexts."""
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
            batch = indices[first : first + batch_size]
            output = generate(
                model,
                input_ids=[list(map(int, pairs[index][0])) for index in batch],
                sampler="low_confidence",
                max_new_tokens=length,
                blocks=blocks,
                eos_early_stop=False,
                guidance_scale=guidance_scale,
            )
            for index, ids in zip(batch, output.new_tokens.tolist(), strict=True):
                is_greedy[index] = ids == list(map(int, pairs[index][1]))
    return is_greedy
