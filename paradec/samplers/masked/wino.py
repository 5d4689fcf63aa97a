"""WINO: commit widely, and take back what the rest of the text does not support.

Hong et al., "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs", arXiv 2507.18578, and the
public code's LLaDA/decoding.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.checks import check_int, check_number
from paradec.protocol import MemorySpec
from paradec.samplers.masked.base import MaskedSampler, Revision, View
from paradec.samplers.statistics import best_one


@dataclass(frozen=True)
class Wino(MaskedSampler):
    """Per row, commit every masked position of the block with confidence > threshold (tau_1), and the best one always;
    then take back decided positions of the block whose token has a shadow probability < threshold_back (tau_2).

    The shadow of a position is a mask with its position id, beside the row, that sees everything but what stands there:
    the token is judged by a prediction that cannot copy it. Shadows stand for the whole block, see each other, and are
    seen by nothing else, so that candidates are what they are without them.

    Args:
        threshold: tau_1, in [0, 1].
        threshold_back: tau_2, in [0, 1]; 0 takes nothing back, and evaluates no shadow.
        cap_share, cap_low, cap_high: at most cap_share of the block's masks are committed in a step (truncated to whole
            positions, then raised to cap_low and lowered to cap_high), the most confident ones.

    Takes back fewer positions than the step before committed (those with the lowest shadow probability), and none in a
    step that commits one: so n masks take at most n steps. What one step commits can be taken back from the next one
    on, until the block is full.

    The public code decodes one row, and its cap and forced position are those of the whole batch; here each row has its
    own. Needs a decoder that predicts in place, and evaluates the block twice (once as shadow) at every step.
    """

    threshold: float = 0.6
    threshold_back: float = 0.9
    cap_share: float = 0.7
    cap_low: int = 5
    cap_high: int = 20

    name = "wino"
    paper = "WINO"
    arxiv = "2507.18578"
    summary = "all above a low confidence; takes back what it would not predict from the rest of the text"
    rereads = True
    revises = shadows = property(lambda self: self.threshold_back > 0)  # type: ignore[assignment]
    frontier = ({"threshold": 0.8}, {"threshold": 0.6, "threshold_back": 0.5})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_number("threshold_back", self.threshold_back, low=0, high=1)
        check_number("cap_share", self.cap_share, low=0, high=1)
        check_int("cap_high", self.cap_high, low=1)
        check_int("cap_low", self.cap_low, low=1, high=self.cap_high)

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"accepted": MemorySpec(dtype=torch.int64)}

    def select(self, view: View) -> Tensor:
        cap = (view.candidates.sum(1) * self.cap_share).long().clamp(self.cap_low, self.cap_high)
        return view.top(view.scores, cap) & (view.scores > self.threshold) | best_one(view.scores)

    def revise(self, view: View, selected: Tensor) -> Revision:
        shadow = view.updates["shadow_confidence"]
        doubted = view.editable & (shadow < self.threshold_back)
        most = torch.where(selected.sum(1) > 1, view.memory["accepted"] - 1, 0)
        return Revision(remask=view.top(torch.where(doubted, -shadow, -torch.inf), most))

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return {"accepted": selected.sum(1)}

    def most_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open
