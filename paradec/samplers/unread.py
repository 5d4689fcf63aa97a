"""What a logits stage may leave in the place of logits, for it knows what is read of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.kernels.token_stats import path_for
from paradec.samplers.statistics import Unread


@dataclass(frozen=True)
class Read(Unread):
    """Logits of which a stage has read what it leaves, so that they are not read again."""

    logits: Tensor
    """[..., V]."""
    best: Tensor
    """[...] int64: the best token."""
    found: Mapping[str, Tensor]
    """Quantities by name, as of `token_statistics`."""

    def written(self) -> Tensor:
        return self.logits

    def statistics(self, reads: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]] | None:
        if not all(name in self.found for name in reads):
            return None
        return self.best, {name: self.found[name] for name in reads}


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


def raise_tokens(logits: Tensor, best: Tensor, prob: Tensor, ids: Tensor, by: Tensor) -> Tensor | Raised:
    """Logits [..., V] with the tokens `ids` [..., K] higher by `by` [..., K]; arguments as in `Raised`. They are
    written where a second read costs next to nothing, and is exact to the last digit: in small vocabularies."""
    raised = Raised(logits, best, prob, ids, by)
    return raised.written() if path_for(logits) == "float64" else raised
