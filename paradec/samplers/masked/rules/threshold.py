"""Confidence threshold (Fast-dLLM, arXiv 2505.22618, section 3.3: confidence-aware parallel decoding)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import MaskedSampler, View
from paradec.samplers.masked.rules.schedules import linear
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class Threshold(MaskedSampler):
    """Per row, commit every masked position of the block with confidence >= threshold, and always the best one.

    Args:
        threshold: probability that a token must reach, in [0, 1].
        quota_per_step: "none" is the paper's rule, without `steps`. Otherwise a block of n masks has a quota of n //
            steps positions per step; without `steps`, of one. "carry" (Fast-dLLM's code for Dream without cache)
            commits at most the quota plus the unused part of earlier quotas. "least" (LLaDA2.0's and SDAR's code)
            commits at least the quota, which is one more in the first n % steps steps. For "least" on a block-causal
            model, n is the block length, even if the prompt ends inside the block.

    Preset "llada2.0" has the threshold of LLaDA2.0's code, for 32 steps in blocks of 32. (This code commits only
    positions above the threshold. At temperature > 0, its confidence is the probability under the filtered distribution
    that tokens are drawn from.)
    """

    threshold: float = 0.9
    quota_per_step: str = "none"

    name = "threshold"
    paper = "Fast-dLLM"
    arxiv = "2505.22618"
    summary = "every token with confidence of at least the threshold, and the best one"
    device_step = True
    presets = {"llada2.0": {"threshold": 0.95}}
    sweep = ({"threshold": 0.7}, {"threshold": 0.5})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_choice("quota_per_step", self.quota_per_step, ("none", "carry", "least"))

    @property
    def uses_steps(self) -> bool:  # type: ignore[override]
        return self.quota_per_step != "none"

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"unused_quota": MemorySpec(dtype=torch.int64)} if self.quota_per_step == "carry" else {}

    def quota(self, state: MaskedState, rows: np.ndarray) -> np.ndarray | None:
        if self.quota_per_step == "none":
            return None
        planned = state.planned_steps(rows)
        if self.quota_per_step == "least":
            if state.steps_per_block is None:
                return planned * 0 + 1
            length = state.masks_at_open[rows]
            if state.facts.topology == "block_causal" and state.request.blocks is None:
                length = length * 0 + (state.request.block_length or state.facts.block_length)
            return linear(length, state.block_step[rows], planned).clip(1)
        # after the planned steps, only the unused part of earlier steps remains
        return np.where(state.block_step[rows] < planned, state.masks_at_open[rows] // planned, 0)

    def select(self, view: View) -> Tensor:
        if self.quota_per_step == "least":
            return select_at_least(view, view.scores >= self.threshold, view.quota)
        confident = (view.scores >= self.threshold) | view.best()
        return confident if view.quota is None else confident & view.top(view.scores, self.max_commits(view))

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        if self.quota_per_step != "carry":
            return {}
        return {"unused_quota": self.max_commits(view) - selected.sum(1)}

    def max_commits(self, view: View) -> Tensor:
        """Compute the largest number of positions to commit, with the unused part of earlier steps: [R] int64."""
        quota = torch.as_tensor(view.quota, device=view.scores.device)
        return (quota + view.memory["unused_quota"]).clamp(min=1)


def select_at_least(view: View, selected: Tensor, least: Any) -> Tensor:
    """Keep `selected` [R, W] in rows where it has `least` ([R] or a number) positions; else select the best `least`."""
    least = torch.as_tensor(least, device=selected.device)
    has_enough = selected.sum(1) >= least
    return torch.where(has_enough.unsqueeze(1), selected, view.top(view.scores, least.expand(len(selected))))
