"""Parts of speculative verification: target distributions, drafts with the distributions that they were drawn from, and
the residual (`paradec.samplers.causal.sjd.verify` puts them together).

The output has exactly the distribution of token-by-token decoding as long as q is what the draft was really drawn from,
each draft has its own u, and no filter touches the residual again. Pure functions of tensors, vectorised over rows and
slots.
Shapes: `R` rows, `W` window slots, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paradec.kernels.token_stats import draw
from paradec.request import Request
from paradec.samplers.distributions import one_hot_on_best, tempered
from paradec.samplers.filters import filter_logits

UNIFORM, ONE_HOT = -1, -2
"""Instead of a place in `DraftDistributions.dense`: drawn uniformly from what may be guessed; put there, whatever the
model says, so that q is one-hot."""
UNLIKELY = -80.0
"""Tokens of a float32 distribution as far as this below the best one, over the temperature, have no probability; 1e-35
else."""


@dataclass
class DraftDistributions:
    """The drafts of a window and the distributions q that they were drawn from; guesses take no memory for theirs."""

    tokens: Tensor
    """[R, W] int64: the drafts."""
    dense: Tensor
    """[R, D, V] float: distributions that drafts may have been drawn from."""
    source: Tensor
    """[R, W] int64: which of `dense` a slot's distribution is, or UNIFORM, or ONE_HOT."""
    guess: Tensor
    """[V] float: the distribution of UNIFORM."""

    def of(self, tokens: Tensor) -> Tensor:
        """q of tokens [R, W, G] -> [R, W, G]."""
        rows, count, size = self.dense.shape
        source = self.source.unsqueeze(-1)
        row = torch.arange(rows, device=tokens.device).view(-1, 1, 1)
        dense = self.dense.reshape(-1).take((row * count + source.clamp(min=0)) * size + tokens)
        one_hot = (tokens == self.tokens.unsqueeze(-1)).to(dense.dtype)
        return torch.where(source >= 0, dense, torch.where(source == UNIFORM, self.guess[tokens], one_hot))

    def of_drafts(self) -> Tensor:
        """q(x) of the drafts x themselves, [R, W]."""
        return self.of(self.tokens.unsqueeze(-1)).squeeze(-1)

    def at(self, slot: Tensor | None = None) -> Tensor:
        """The whole distributions of slots [R, N], of all by default: [R, N, V]."""
        source, tokens = self.source, self.tokens
        if slot is not None:
            source, tokens = source.gather(1, slot), tokens.gather(1, slot)
        q = at_slots(self.dense, source.clamp(min=0))
        q = torch.where((source == UNIFORM).unsqueeze(-1), self.guess, q)
        one_hot = (source == ONE_HOT).unsqueeze(-1)
        q.mul_(~one_hot)
        return q.scatter_add_(-1, tokens.unsqueeze(-1), one_hot.to(q.dtype))


@dataclass
class DraftWindow:
    """What one forward says of a window of drafts: all that a method's `accept` reads."""

    p: Tensor
    """[R, W, V]: the target distribution of each slot, given the drafts before it."""
    drafts: DraftDistributions
    """The drafts x, and q."""
    fresh: Tensor
    """[R, W] int64: tokens drawn from p."""
    embeddings: Tensor | None = None
    """[V, d]: of the model's tokens, for methods that compare them (`CausalSampler.compared_by`)."""

    def ratio(self) -> Tensor:
        """p(x) / q(x) of the drafts x, [R, W]."""
        return probability(self.p, self.drafts.tokens) / self.drafts.of_drafts()


class Verified(NamedTuple):
    """What became of a window."""

    tokens: Tensor
    """[R, W] int64: the window after the step. Final up to and including slot `accepted`."""
    accepted: Tensor
    """[R, 1] int64: drafts accepted, those before the first rejection; one token more becomes final (-1: none does)."""
    kept: Tensor | None = None
    """[R, W] bool: slots whose old draft waits on, unverified, with its old q; None when there are none."""


def coupled(window: DraftWindow, drafted: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """SCD's maximal coupling (arXiv 2510.24211): each slot's draft becomes a token from p that differs as rarely as the
    two distributions allow. It keeps the draft with probability min(1, p / q), else it resamples from the residual.

    Returns:
        [R, W] int64: the tokens, and what each slot resamples.
    """
    resampled = draw(residual(window.p, window.drafts.at()), uniform[..., 1])
    tokens = torch.where(uniform[..., 0] < window.ratio(), window.drafts.tokens, resampled)
    return torch.where(drafted, tokens, window.fresh), resampled


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Weights max(0, p - q) [..., V], not normalised; p itself where only rounding leaves nothing."""
    weights = (p - q).clamp_(min=0)
    nothing = weights.amax(-1, keepdim=True) <= 0
    # p is added once or not at all: a choice between the two would copy either
    return weights.addcmul_(p, nothing.to(p.dtype))


def at_slots(distributions: Tensor, slot: Tensor) -> Tensor:
    """Of distributions [R, W, V] those of slots [R, N] -> [R, N, V], a copy."""
    return distributions[torch.arange(len(distributions), device=distributions.device).unsqueeze(1), slot]


def probability(distribution: Tensor, tokens: Tensor) -> Tensor:
    """distribution [..., V] of tokens [...] -> [...]."""
    return distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_distribution(logits: Tensor, request: Request, allowed: Tensor | None = None) -> Tensor:
    """What a token is drawn from: logits [..., V] -> [..., V], float32 or the logits' own wider type.

    At temperature 0 it is one-hot on the best token. `allowed` [V] bool: the others get nothing. Rows without a finite
    logit that is allowed are NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if allowed is not None:
        logits = torch.where(allowed, logits, -torch.inf)
    if request.temperature == 0:
        return one_hot_on_best(logits)
    if request.temperature != 1:
        logits = tempered(logits, request.temperature)
        # softmax takes twice as long over what is too small to be drawn
        if logits.dtype == torch.float32:
            logits = torch.threshold_(logits, UNLIKELY, -torch.inf)
    if request.top_p is not None or request.top_k is not None:
        logits = filter_logits(logits, request.top_p, request.top_k)
    return logits.softmax(-1)
