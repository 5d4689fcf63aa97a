"""Speculative verification over causal models: laws, draws, and the judgement of a window of drafts.

Pure functions of tensors, vectorised over rows and slots. Two invariants make a method exact whenever a draft stands
with probability min(1, p / q): every draft carries the law q that it was really drawn from, with draws of its own; and
what replaces a fallen draft comes from norm(max(0, p - q)), which no filter may touch again.

Shapes: `R` rows, `W` window slots, `V` words. p is the model's law at a slot, given the drafts before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paradec.request import Request
from paradec.samplers.statistics import argmax, filter_logits, tempered

UNIFORM, CERTAIN = -1, -2
"""Instead of a place in `DraftLaws.dense`: drawn uniformly from the support; put there, whatever the model says."""
BELOW_ONE = 1 - 2.0**-53
"""53 random bits may round to 1, which lies past the last word."""
UNLIKELY = -80.0
"""Words of a float32 law as far as this below the best one, over the temperature, have no probability; 1e-35 else."""
SEGMENT = 128
"""Words summed at once when a number is drawn: one pass that only reads, and a cumulative sum of 1 / 128 of it."""


@dataclass
class DraftLaws:
    """The drafts of a window and the laws q that they were drawn from; guesses take no memory for theirs."""

    tokens: Tensor
    """[R, W] int64: the drafts."""
    dense: Tensor
    """[R, D, V] float: laws that drafts may have been drawn from."""
    source: Tensor
    """[R, W] int64: which of `dense` a slot's law is, or UNIFORM, or CERTAIN."""
    support: Tensor
    """[V] float: the law of UNIFORM."""

    def of(self, words: Tensor) -> Tensor:
        """q of words [R, W, G] -> [R, W, G]."""
        rows, count, size = self.dense.shape
        source = self.source.unsqueeze(-1)
        row = torch.arange(rows, device=words.device).view(-1, 1, 1)
        found = self.dense.reshape(-1).take((row * count + source.clamp(min=0)) * size + words)
        certain = (words == self.tokens.unsqueeze(-1)).to(found.dtype)
        return torch.where(source >= 0, found, torch.where(source == UNIFORM, self.support[words], certain))

    def of_drafts(self) -> Tensor:
        """q of the drafts themselves, [R, W]."""
        row = torch.arange(len(self.tokens), device=self.tokens.device).unsqueeze(1)
        found = self.dense[row, self.source.clamp(min=0), self.tokens]
        guessed = torch.where(self.source == UNIFORM, self.support[self.tokens], 1)
        return torch.where(self.source >= 0, found, guessed)

    def at(self, slot: Tensor) -> Tensor:
        """The whole laws of slots [R, N] -> [R, N, V]."""
        source = self.source.gather(1, slot)
        law = laws_at(self.dense, source.clamp(min=0))
        law = torch.where((source == UNIFORM).unsqueeze(-1), self.support, law)
        certain = (source == CERTAIN).unsqueeze(-1)
        law.mul_(~certain)
        return law.scatter_add_(-1, self.tokens.gather(1, slot).unsqueeze(-1), certain.to(law.dtype))


class Judged(NamedTuple):
    """What became of a window."""

    tokens: Tensor
    """[R, W] int64: the window after the step. Final up to and including slot `standing`."""
    standing: Tensor
    """[R, 1] int64: drafts that stand before the first that fell."""
    kept: Tensor | None
    """[R, W] bool: slots whose old draft waits on, unjudged, with its old q; None when there are none."""


def judge(
    law: Tensor,
    drafts: DraftLaws,
    drafted: Tensor,
    chance: Tensor,
    fresh: Tensor,
    uniform: Tensor,
    refresh: str = "resample",
    redraw: bool = True,
) -> Judged:
    """Judge a window of drafts.

    Drafts stand up to the first that falls. That one is redrawn from norm(max(0, p - q)); what becomes of the slots
    after it is `refresh`. The slot after the last draft takes its fresh token.

    Args:
        law: [R, W, V], p. drafts: the drafts of the slots, with q.
        drafted: [R, W] bool, False where a slot holds no draft (its last one never does).
        chance: [R, W]: probability that a draft stands, given those before it.
        fresh: [R, W] int64, drawn from p.
        uniform: [R, W, 2] in (0, 1): judges the draft, redraws it.
        refresh: of the slots behind the first that fell: "resample" takes `fresh`; "maximal" keeps each draft with
            probability min(1, p / q) and else redraws it from what is left, so that it changes as rarely as its law
            allows; "keep" leaves draft and q alone. "gumbel" is "resample": `fresh` shares its noise with the drafts.
        redraw: False takes the fresh token where a draft fell (methods whose drafts stand only when they equal it).
    """
    slot = torch.arange(law.shape[1], device=law.device)
    stands = drafted & (uniform[..., 0] < chance)
    standing = stands.long().cumprod(1).sum(1, keepdim=True)
    fell = drafted & (slot == standing)
    tokens = fresh
    if refresh == "maximal":
        redrawn = draw(leftover(law, drafts.at(slot.expand(len(law), -1))), uniform[..., 1])
        ratio = probability(law, drafts.tokens) / drafts.of_drafts()
        tokens = torch.where(drafted, torch.where(uniform[..., 0] < ratio, drafts.tokens, redrawn), fresh)
        if redraw:
            tokens = torch.where(fell, redrawn, tokens)
    elif redraw:
        redrawn = draw(leftover(laws_at(law, standing), drafts.at(standing)), uniform[..., 1].gather(1, standing))
        tokens = torch.where(fell, redrawn, fresh)
    if not redraw:
        tokens = torch.where(fell, fresh, tokens)
    kept = drafted & (slot > standing) if refresh == "keep" else None
    held = slot < standing if kept is None else (slot < standing) | kept
    return Judged(torch.where(held, drafts.tokens, tokens), standing, kept)


def leftover(p: Tensor, q: Tensor) -> Tensor:
    """Weights max(0, p - q) [..., V] of what replaces a fallen draft; p itself where only rounding leaves nothing."""
    weights = (p - q).clamp_(min=0)
    nothing = weights.amax(-1, keepdim=True) <= 0
    # p is added once or not at all: a choice between the two would copy either
    return weights.addcmul_(p, nothing.to(p.dtype))


def laws_at(laws: Tensor, slot: Tensor) -> Tensor:
    """Of laws [R, W, V] those of slots [R, N] -> [R, N, V], a copy."""
    return laws[torch.arange(len(laws), device=laws.device).unsqueeze(1), slot]


def probability(law: Tensor, tokens: Tensor) -> Tensor:
    """law [..., V] of tokens [...] -> [...]."""
    return law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_law(logits: Tensor, request: Request, allowed: Tensor | None = None) -> Tensor:
    """The law that a token is drawn from: logits [..., V] -> [..., V], float32 or the logits' own wider type.

    Temperature 0 is certain of the best word. `allowed` [V] bool: the others get nothing. Rows without a finite logit
    that is allowed are NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if request.temperature == 0:
        best = argmax(logits).unsqueeze(-1)
        law = torch.zeros_like(logits).scatter_(-1, best, 1)
        return law.masked_fill_(~logits.gather(-1, best).isfinite(), torch.nan)
    if request.temperature != 1:
        logits = tempered(logits, request.temperature)
        if logits.dtype == torch.float32:  # softmax takes twice as long over what is too small to be drawn
            logits = torch.threshold_(logits, UNLIKELY, -torch.inf)
    return filter_logits(logits, request.top_p, request.top_k).softmax(-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from weights [..., V] (not normalised) with one number [...] in (0, 1) each: [...] int64.

    The smallest k with w_0 + ... + w_k > u sum(w); a word without weight is never drawn. Segments of words are summed
    in the weights' own type, their sums and the words of the segment that is hit in float64.
    """
    size = weights.shape[-1]
    uniform = uniform.unsqueeze(-1).clamp(max=BELOW_ONE)
    if size <= 4 * SEGMENT:
        total = weights.cumsum(-1, dtype=torch.float64)
        return _first_beyond(total, uniform * total[..., -1:]).squeeze(-1)
    whole = size // SEGMENT * SEGMENT
    sums = weights[..., :whole].unflatten(-1, (-1, SEGMENT)).sum(-1)
    if whole < size:
        sums = torch.cat((sums, weights[..., whole:].sum(-1, keepdim=True)), -1)
    total = sums.cumsum(-1, dtype=torch.float64)
    target = uniform * total[..., -1:]
    segment = _first_beyond(total, target)
    inside = sums.gather(-1, segment)
    share = ((target - total.gather(-1, segment) + inside) / inside).clamp(0, BELOW_ONE)  # of the segment
    column = segment * SEGMENT + torch.arange(SEGMENT, device=weights.device)
    if whole < size:
        part = weights.gather(-1, column.clamp(max=size - 1)).masked_fill(column >= size, 0)
    else:
        part = weights.gather(-1, column)
    total = part.cumsum(-1, dtype=torch.float64)
    found = segment * SEGMENT + _first_beyond(total, share * total[..., -1:])
    return found.squeeze(-1).clamp_(max=size - 1)  # as in `_first_beyond`


def _first_beyond(total: Tensor, target: Tensor) -> Tensor:
    """The first entry of cumulative sums [..., N] that is larger than target [..., 1]: [..., 1]."""
    # the clamp is for NaN weights, which a commit refuses
    return torch.searchsorted(total, target, right=True).clamp(max=total.shape[-1] - 1)
