"""Saber: commits above the mean confidence, and backtracks where confidence falls (arXiv 2510.18165; decoding.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import MaskedSampler, Needs, Revision, View


@dataclass(frozen=True)
class Saber(MaskedSampler):
    """Per row, commit every masked position of the block with confidence > tau, and at least `minimum` positions. tau
    is the mean confidence with which the row's tokens were committed (1 at the start). A step that commits k positions
    also takes back max(minimum // 2, ceil(remask_share * k)) earlier positions (at most k - 1), those whose confidence
    has fallen most since the previous step.

    Args:
        minimum: n, minimum number of positions that a step commits, at least 1.
        remask_share: share of k in [0, 1], 1/8 in the public code; 0 takes nothing back.

    The mean is over all blocks. If a position was taken back, its latest commit counts. A decided position's confidence
    is that of the model's candidate, even if the position has another token. A step that fills the block takes nothing
    back, and every other step adds at least one decided position, so that n masks need at most n steps.

    Three points differ from the public code. Only tokens of the open block are taken back, since caches rely on the
    tokens before the block. No token is taken back in the step that commits it. Prompt positions never count as
    committed; in the public code they count once fewer than `minimum` masks remain.
    """

    minimum: int = 2
    remask_share: float = 0.125

    name = "saber"
    paper = "Saber"
    arxiv = "2510.18165"
    summary = "all tokens above the mean confidence so far; takes back tokens whose confidence fell most"
    needs = Needs(decided_logits=True)
    sweep = ({"minimum": 1}, {"minimum": 4})

    def __post_init__(self) -> None:
        check_int("minimum", self.minimum, low=1)
        check_number("remask_share", self.remask_share, low=0, high=1)
        object.__setattr__(self, "needs", replace(self.needs, revises=self.remask_share > 0))

    def memory(self) -> Mapping[str, MemorySpec]:
        double = torch.float64
        return {
            "total": MemorySpec(dtype=double, reset="sequence"),
            "count": MemorySpec(dtype=torch.int64, reset="sequence"),
            # confidence at the position's latest commit (-1 before the first), and in the previous step
            "committed": MemorySpec(("window",), double, fill=-1.0),
            "last": MemorySpec(("window",), double),
        }

    def select(self, view: View) -> Tensor:
        total, count = view.memory["total"], view.memory["count"]
        tau = torch.where(count > 0, total / count.clamp(min=1), 1.0).unsqueeze(1)
        least = torch.full_like(count, self.minimum)
        return (view.scores > tau) | view.top(view.scores, least)

    def revise(self, view: View, selected: Tensor) -> Revision:
        count = selected.sum(1)
        share = (count * self.remask_share).ceil().long().clamp(min=self.minimum // 2)
        limit = torch.minimum(share, count - 1)
        fills = (selected | ~view.candidates).all(1)
        drop = view.memory["last"] - view.quantities["confidence"]
        return Revision(remask=view.top(torch.where(view.editable, drop, -torch.inf), limit.masked_fill(fills, 0)))

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        confidence, before = view.quantities["confidence"], view.memory["committed"]
        is_first = selected & (before < 0)
        added = torch.where(selected, confidence - before.clamp(min=0), 0.0)
        return {
            "total": view.memory["total"] + added.sum(1),
            "count": view.memory["count"] + is_first.sum(1),
            "committed": torch.where(selected, confidence, before),
            "last": confidence,
        }

    def max_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open
