"""Which rows a log-likelihood is read from: what is masked in each, and what it counts (see `likelihood`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.facts import ModelFacts


@dataclass(frozen=True)
class Masking:
    """One row to evaluate."""

    tokens: list[int]
    at: list[int]
    """Positions of `tokens` that are judged."""
    ids: list[int]
    """What is there in the continuation."""
    context: int
    """How many tokens are before the continuation."""
    weight: float
    stratum: int
    """Weighted values of one stratum add up to one estimate."""


@dataclass(frozen=True)
class MaskingSpan:
    """What is made at once: a whole continuation, or of a block-causal model what a block has of it."""

    rows: list[Masking]
    samples: int
    """Strata, times the rows that each averages."""
    drawn: bool
    """Whether anything of it was left to chance."""


@dataclass(frozen=True)
class _Span:
    """Where a part is: positions [begin, end) of rows that are `width` wide."""

    begin: int
    end: int
    width: int


def exact(context: list[int], continuation: list[int]) -> list[MaskingSpan]:
    """One row, in which causal models judge every position by what comes before it."""
    row = context + continuation
    at = list(range(len(context), len(row)))
    return [MaskingSpan([Masking(row, at, continuation, len(context), 1.0, 0)], 1, False)]


def chain(
    facts: ModelFacts, context: list[int], continuation: list[int], order: str, samples: int, seed: int
) -> list[MaskingSpan]:
    """A row for each position of each order: those before it in the order are given, the others masked."""
    row, parts = context + continuation, []
    keys = _keys(seed, row)
    for span in _spans(facts, len(context), len(continuation)):
        drawn = order == "random" and span.end - span.begin > 1
        if drawn:
            orders = span.begin + _scores(keys, span, samples).argsort(axis=1, kind="stable")
        else:
            one = np.arange(span.begin, span.end)
            orders = (one[::-1] if order == "right_to_left" else one)[None]
        rows = [
            Masking(_masked(row, facts, span, places[k:]), [place], [row[place]], len(context), 1.0, number)
            for number, places in enumerate(orders.tolist())
            for k, place in enumerate(places)
        ]
        parts.append(MaskingSpan(rows, len(orders), drawn))
    return parts


def monte_carlo(
    facts: ModelFacts, context: list[int], continuation: list[int], samples: int, stratum: int, seed: int
) -> list[MaskingSpan]:
    """Random maskings, `stratum` of them with numbers of masks that are spread evenly; or all of them, where these are
    no more than `samples`."""
    row, parts = context + continuation, []
    keys = _keys(seed, row)
    for span in _spans(facts, len(context), len(continuation)):
        length = span.end - span.begin
        few = length < samples.bit_length() + 1 and 2**length - 1 <= samples
        chosen: list[tuple[Sequence[int], float, int]] = []
        if few:
            for size in range(1, length + 1):
                # each size has the share 1 / L, which its subsets share evenly; L / size is the estimate's own weight
                weight = 1 / (size * math.comb(length, size))
                subsets = itertools.combinations(range(span.begin, span.end), size)
                chosen += [(subset, weight, 0) for subset in subsets]
        else:
            together = min(stratum, samples)
            sizes = _sizes(keys, span.begin, length, samples, together)
            ranks = _scores(keys, span, samples).argsort(axis=1, kind="stable")
            for number, (size, ranked) in enumerate(zip(sizes, ranks, strict=True)):
                at = sorted((span.begin + ranked[:size]).tolist())
                chosen.append((at, length / (size * together), number // together))
        rows = [
            Masking(_masked(row, facts, span, at), [*at], [row[i] for i in at], len(context), weight, number)
            for at, weight, number in chosen
        ]
        parts.append(MaskingSpan(rows, len(rows), not few))
    return parts


def _spans(facts: ModelFacts, context: int, length: int) -> list[_Span]:
    stop, block = context + length, facts.block_length
    if facts.topology != "block_causal" or block is None:
        return [_Span(context, stop, stop)]
    first = context if facts.prompt_aligned else 0
    cuts = [context, *range(context + block - (context - first) % block, stop, block), stop]
    longest = facts.max_length or stop + block
    return [_Span(a, b, min(first - (first - b) // block * block, longest)) for a, b in itertools.pairwise(cuts)]


def _masked(row: list[int], facts: ModelFacts, span: _Span, hidden: Sequence[int]) -> list[int]:
    """A row up to the span's width, with masks at `hidden` and after the span's end."""
    tokens = row[: span.end] + [facts.mask_id] * (span.width - span.end)
    for position in hidden:
        tokens[position] = facts.mask_id
    return tokens


def _keys(seed: int, row: list[int]) -> Tensor:
    return torch.as_tensor(rng.row_keys([seed], [row]))


def _scores(keys: Tensor, span: _Span, samples: int) -> np.ndarray:
    """[samples, L] uniform draws: the order of a row of them is a random order of the positions."""
    positions = torch.arange(span.begin, span.end).expand(samples, -1)
    drawn = rng.uniform(keys.expand(samples, -1), torch.arange(samples), positions, 1, rng.POSITION_STREAM)
    return drawn.squeeze(-1).numpy()


def _sizes(keys: Tensor, begin: int, length: int, samples: int, stratum: int) -> list[int]:
    """How many positions each masking hides: uniform on 1 to L, and spread evenly within a stratum."""
    strata = samples // stratum
    place = torch.full((strata, 1), begin)
    first = rng.uniform(keys.expand(strata, -1), torch.arange(strata), place, 1, rng.TOKEN_STREAM).view(strata)
    offsets = (first * length).long().clamp(max=length - 1)
    steps = torch.arange(stratum) * length // stratum
    return ((offsets.unsqueeze(1) + steps) % length + 1).flatten().tolist()
