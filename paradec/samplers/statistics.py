"""Numbers read from logits, under the names that samplers declare.

How they are computed is `paradec.kernels.token_stats`' business. Scores are float64 whatever the path: trained models
are so confident of many positions that float32 probabilities tie at 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import TokenDraws, TokenStats, path_for, read_stats, stats_where

QUANTITIES = ("confidence", "margin", "negative_entropy", "minus_entropy", "best_token", "logit_gap")
FIELDS = {
    "margin": "margin",
    "negative_entropy": "smoothed_entropy",
    "minus_entropy": "entropy",
    "logit_gap": "gap",
}
"""What the quantities are called in `TokenStats`; entropies with the other sign, so that higher is more confident."""
IN_ONE_READ = FIELDS | {"negative_entropy": "entropy"}
"""The same where a second read, or a second logarithm, would cost more than the first."""


def token_statistics(
    logits: Tensor,
    reads: tuple[str, ...],
    tokens: Tensor | None = None,
    draws: TokenDraws | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Statistics of each position's distribution softmax(logits / temperature).

    Args:
        logits: [..., V] of any float dtype; -inf excludes a token.
        reads: which of `QUANTITIES` to compute.
        tokens: [...] int64: "confidence" is the probability of these; None takes the best token (lowest id on ties).
        draws: asks for tokens that are drawn, instead.
        temperature: above 0; divides all logits, those of "logit_gap" too.

    Returns:
        The tokens [...] int64, and the quantities by name, each [...] float64: "confidence" p(token), "margin"
        p(1st) - p(2nd), "minus_entropy" sum p ln p, "negative_entropy" sum p ln(p + 1e-10) (Dream's form; higher is
        more confident), "best_token" the likeliest token (int64), "logit_gap" z(1st) - z(2nd). All but the last two are
        NaN where a logit is NaN or +inf. Large vocabularies, which are read in float32, have sum p ln p in place of
        Dream's form: less by 1e-10 a token at most, where its second logarithm would cost more than all else.
    """
    fields = FIELDS
    if "negative_entropy" in reads and path_for(logits) != "float64":
        fields = IN_ONE_READ
    stats = read_stats(logits, _wanted(reads, fields is FIELDS), temperature, ids=tokens, draws=draws)
    prob: Tensor | None = stats.prob
    if draws is not None:
        tokens, prob = stats.sample, stats.sample_prob
    elif tokens is not None:
        prob = stats.ids_prob
    return stats.token if tokens is None else tokens, _named(stats, prob, reads, fields, temperature)


def _named(
    stats: TokenStats, prob: Tensor | None, reads: tuple[str, ...], fields: Mapping[str, str], temperature: float
) -> dict[str, Tensor]:
    """Quantities by name. prob: of the tokens."""
    found: dict[str, Tensor] = {}
    for name in reads:
        if name == "confidence":
            assert prob is not None  # of the tokens that were asked for
            found[name] = prob
        elif name == "best_token":
            found[name] = stats.token
        else:
            value = getattr(stats, fields[name])
            if name == "logit_gap" and temperature != 1:
                value = value / temperature
            found[name] = -value if name.endswith("entropy") else value
    return found


def statistics_where(
    logits: Tensor, reads: tuple[str, ...], chosen: Tensor, current: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `token_statistics` has them of large vocabularies on the CPU, of the `chosen` [...] of the positions alone."""
    stats = stats_where(logits, chosen, _wanted(reads, False))
    return spread_over(chosen, stats.token, _named(stats, stats.prob, reads, IN_ONE_READ, 1.0), current)


def spread_over(
    chosen: Tensor, tokens: Tensor, found: Mapping[str, Tensor], current: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens and quantities [N] of the `chosen` [...] of the positions, over all of them: elsewhere are the token that
    is there now (`current` [...], or 0) and 0, as at positions that a query leaves out."""
    now = torch.zeros_like(chosen, dtype=torch.int64) if current is None else current
    spread = {name: value.new_zeros(chosen.shape).masked_scatter_(chosen, value) for name, value in found.items()}
    return now.masked_scatter(chosen, tokens), spread


@lru_cache(maxsize=64)
def _wanted(reads: tuple[str, ...], smoothed: bool) -> frozenset[str]:
    fields = FIELDS if smoothed else IN_ONE_READ
    return frozenset(fields[name] for name in reads if name in fields)


def best_with_probability(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token [...] (int64) of logits [..., V], and its probability [...], in float32 at least: enough where it
    is not compared with a threshold, and cheap."""
    if path_for(logits) != "float64":
        stats = read_stats(logits, frozenset())
        return stats.token, stats.prob
    # a small vocabulary takes half the time of float64 in float32
    best = logits.argmax(-1, keepdim=True)
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return best.squeeze(-1), p.gather(-1, best).squeeze(-1)


class Unread(ABC):
    """Logits [..., V] that a stage leaves unwritten, with `token_statistics` of what it leaves; None of what has to be
    read."""

    @abstractmethod
    def written(self) -> Tensor: ...
    @abstractmethod
    def statistics(self, reads: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]] | None: ...


@dataclass(frozen=True)
class Raised(Unread):
    """Logits of which a few tokens per position are raised, unwritten: a confidence follows from what was read of the
    logits before, without reading them again. Shapes: `K` tokens of every position."""

    logits: Tensor
    """[..., V]."""
    best: Tensor
    """[...] int64: the best token before."""
    prob: Tensor
    """[...] float64: its probability before."""
    ids: Tensor
    """[..., K] int64, distinct within a position; -1 raises nothing."""
    by: Tensor
    """[..., K] float, at least 0."""

    def written(self) -> Tensor:
        """The raised logits [..., V], a copy, in float32 at least: bfloat16 would round the difference away."""
        copy = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32), copy=True)
        return copy.scatter_add_(-1, self.ids.clamp(min=0), self.by.where(self.ids >= 0, 0).to(copy.dtype))

    def statistics(self, reads: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The best token [...] int64 after raising (the lowest id on ties), and its probability [...] float64."""
        if reads != ("confidence",):
            return None
        best = self.best.unsqueeze(-1)
        tokens = torch.cat((best, self.ids.clamp(min=0)), -1)
        z = self.logits.gather(-1, tokens).double()
        z = z - z[..., :1]
        by = torch.cat((self.by.where(self.ids == best, 0).sum(-1, keepdim=True), self.by), -1).double()
        # the best token is counted once, and tokens that are not there not at all
        counted = torch.cat((torch.ones_like(best, dtype=torch.bool), (self.ids >= 0) & (self.ids != best)), -1)
        higher = (z + by).where(counted, -torch.inf)
        top = higher.amax(-1, keepdim=True)
        # all shares are of what the best token has now, so that no credit is too high for them
        raised, share = (higher - top).exp(), (z - top).exp().where(counted, 0)
        total = (-top.squeeze(-1)).exp() / self.prob + (raised - share).sum(-1)
        most = raised.amax(-1)
        first = tokens.where(counted & (raised == most.unsqueeze(-1)), torch.iinfo(torch.int64).max).amin(-1)
        # where a logit is NaN no token is the first one
        return first.where(most.isfinite(), self.best), {"confidence": most / total}


def written(logits: Tensor | Unread) -> Tensor:
    """Logits [..., V], written out if they are not."""
    return logits.written() if isinstance(logits, Unread) else logits


def raise_tokens(logits: Tensor, best: Tensor, prob: Tensor, ids: Tensor, by: Tensor) -> Tensor | Raised:
    """Logits [..., V] with the tokens `ids` [..., K] higher by `by` [..., K]; arguments as in `Raised`. They are
    written where a second read costs next to nothing, and is exact to the last digit: in small vocabularies."""
    raised = Raised(logits, best, prob, ids, by)
    return raised.written() if path_for(logits) == "float64" else raised


def top_by_rank(scores: Tensor, count: np.ndarray | Tensor) -> Tensor:
    """The `count` highest scores of each row; equal scores go to the lower index.

    Args:
        scores: [R, W], -inf where not eligible.
        count: [R] int64, on the host or the device.

    Returns:
        [R, W] bool; never an ineligible entry.
    """
    if isinstance(count, np.ndarray):
        if set(count.tolist()) == {1}:  # one token a step needs no sort
            at = scores.argmax(-1, keepdim=True)
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, at, scores.gather(-1, at) > -torch.inf)
        count = torch.as_tensor(count, device=scores.device)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    return torch.zeros_like(within).scatter(-1, order, within) & (scores > -torch.inf)


def best_one(scores: Tensor) -> Tensor:
    """The highest score of each row [R, W] (the lowest index on ties), as a [R, W] bool mask."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), True)
