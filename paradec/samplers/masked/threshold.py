"""Confidence threshold: everything that is sure enough becomes final at once.

Wu et al., "Fast-dLLM", arXiv 2505.22618, section 3.3 (confidence-aware parallel decoding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.canvas import CanvasState
from paradec.checks import check_choice, check_number
from paradec.protocol import MemorySpec
from paradec.samplers.masked.base import MaskedSampler, View


@dataclass(frozen=True)
class Threshold(MaskedSampler):
    """Per row, commit every masked position of the block with confidence >= threshold, and the best one always.

    Args:
        threshold: probability that a token must reach, in [0, 1].
        quota_per_step: "none" is the paper's rule, which has no use for `steps`. "carry" is what Fast-dLLM's code for
            Dream without cache does: at most masks // steps positions per step, plus those that earlier steps refused
            for lack of confidence; it needs `steps`.
    """

    threshold: float = 0.9
    quota_per_step: str = "none"

    name = "threshold"
    paper = "Fast-dLLM"
    arxiv = "2505.22618"
    summary = "every token with confidence of at least the threshold, and the best one"
    device_step = True
    frontier = ({"threshold": 0.7}, {"threshold": 0.5})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_choice("quota_per_step", self.quota_per_step, ("none", "carry"))

    @property
    def uses_steps(self) -> bool:  # type: ignore[override]
        return self.quota_per_step == "carry"

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"refused": MemorySpec(dtype=torch.int64)} if self.quota_per_step == "carry" else {}

    def quota(self, state: CanvasState, rows: np.ndarray) -> np.ndarray | None:
        if self.quota_per_step == "none":
            return None
        planned = state.planned_steps(rows)
        # once the planned steps are over, only what was refused is left
        return np.where(state.block_step[rows] < planned, state.masks_at_open[rows] // planned, 0)

    def select(self, view: View) -> Tensor:
        sure = (view.scores >= self.threshold).scatter_(-1, view.scores.argmax(-1, keepdim=True), True)
        if view.quota is None:
            return sure
        return sure & view.top(view.scores, self.granted(view))

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        if view.quota is None:
            return {}
        return {"refused": self.granted(view) - selected.sum(1)}

    def granted(self, view: View) -> Tensor:
        """[R] int64: positions that may be committed at most: the schedule's, and what was refused before."""
        quota = torch.as_tensor(view.quota, device=view.scores.device)
        return (quota + view.memory["refused"]).clamp(min=1)
