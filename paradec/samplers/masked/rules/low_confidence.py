"""Low-confidence remasking (LLaDA, arXiv 2502.09992, and its generate.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from paradec.samplers.masked.loop import MaskedSampler, View
from paradec.samplers.masked.rules.schedules import linear
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class LowConfidence(MaskedSampler):
    """Per row and step, commit the `quota` most confident positions of the block; other positions stay masked.

    With s steps for a block of n masks the quota is n // s, and one more in each of the first n % s steps; without
    `steps` it is 1. Confidence is the candidate token's probability under softmax(logits), at any temperature. Unlike
    in generate.py, a block closes as soon as it has no masks, and ties go to the lower position.
    """

    name = "low_confidence"
    paper = "LLaDA"
    arxiv = "2502.09992"
    summary = "the most confident tokens first, in equal numbers per step"
    device_step = True
    uses_steps = True
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})
    may_exceed_plan: ClassVar[bool] = False
    """Whether a block may need more steps than planned; then the quota of each step is at least 1."""

    def quota(self, state: MaskedState, rows: np.ndarray) -> np.ndarray:
        if state.steps_per_block is None:
            return np.ones(len(rows), np.int64)
        quota = linear(state.masks_at_open[rows], state.block_step[rows], state.planned_steps(rows))
        return np.maximum(quota, 1) if self.may_exceed_plan else quota

    def select(self, view: View) -> Tensor:
        return view.top(view.scores, view.quota)
