"""Coherent contextual decoding as released (CCD, arXiv 2512.02044): the public code for Dream compares two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_bool, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import Needs, View
from paradec.samplers.masked.rules.low_confidence import LowConfidence


@dataclass(frozen=True)
class CCDAgree(LowConfidence):
    """Per row, order the masked positions by entropy. Let b be the linear schedule's number (1 without `steps`), T the
    set of the first b positions, V the set of the first n positions, and B the buffer of the previous step.

    Q is the set of positions in both V and B whose best token is the same as in the previous step. A step commits Q if
    T and B share a position and Q has at least b positions. In all other cases, and in the first `warmup` steps, the
    step commits T. Then the n still masked positions of lowest entropy become the new B. n is 1 before the last warmup
    step, and 2 in it (without warmup, in the first step); then it grows by one per step, up to b * (1 + expand_ratio).
    It is 2 once at most a share `tail` of the block's initial masks is left.

    Args:
        warmup: steps of a block before agreement is used, at least 0.
        expand_ratio: limit of n's growth, at least 0.
        tail: share of the block's initial masks, in [0, 1].
        adaptive: True commits all of Q (CCD-DS, the code's `seek_mode`), False only its first b positions.

    Best tokens are the model's, even if other tokens are drawn at temperature > 0. The public code decodes one row,
    over the whole canvas and without a cache; here steps, buffer and shares are counted per row and block. A position
    that a cache does not evaluate in a step keeps its last best token.
    """

    warmup: int = 5
    expand_ratio: float = 4.0
    tail: float = 0.1
    adaptive: bool = True

    name = "ccd_agree"
    paper = "CCD"
    arxiv = "2512.02044"
    summary = "the tokens with the lowest entropy, several where two steps agree"
    needs = Needs(reads=("best_token",), score="negative_entropy", score_from="sampled")
    may_exceed_plan = True
    sweep = ({"warmup": 1}, {"warmup": 1, "expand_ratio": 15.0})

    def __post_init__(self) -> None:
        check_int("warmup", self.warmup, low=0)
        check_number("expand_ratio", self.expand_ratio, low=0)
        check_number("tail", self.tail, low=0, high=1)
        check_bool("adaptive", self.adaptive)

    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            "best": MemorySpec(("window",), torch.int64, fill=-1),
            "buffer": MemorySpec(("window",), torch.bool),
            "step": MemorySpec((), torch.int64),
            "masks": MemorySpec((), torch.int64),  # number of masks at the block's first step
        }

    def select(self, view: View) -> Tensor:
        scores = view.scores
        b = torch.as_tensor(view.quota, device=scores.device)
        scheduled, buffer = view.top(scores, b), view.memory["buffer"]
        is_same = view.quantities["best_token"] == view.memory["best"]
        agreed = view.top(scores, self.buffer_size(view)) & buffer & is_same
        has_enough = (scheduled & buffer).any(1) & (agreed.sum(1) >= b) & (view.memory["step"] >= self.warmup)
        if not self.adaptive:
            agreed = view.top(scores.masked_fill(~agreed, -torch.inf), b)
        return torch.where(has_enough.unsqueeze(1), agreed, scheduled)

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return {
            "best": torch.where(view.candidates, view.quantities["best_token"], view.memory["best"]),
            "buffer": view.top(view.scores.masked_fill(selected, -torch.inf), self.buffer_size(view)),
            "step": view.memory["step"] + 1,
            "masks": self.initial_masks(view),
        }

    def initial_masks(self, view: View) -> Tensor:
        """Count the masked positions of the block at its first step: [R] int64."""
        return torch.where(view.memory["step"] == 0, view.candidates.sum(1), view.memory["masks"])

    def buffer_size(self, view: View) -> Tensor:
        """Compute n, the size of the buffer: [R] int64."""
        b = torch.as_tensor(view.quota, device=view.scores.device)
        n = (view.memory["step"] - max(self.warmup, 1) + 3).clamp(min=1).minimum((b * (1 + self.expand_ratio)).long())
        return torch.where(view.candidates.sum(1) <= self.tail * self.initial_masks(view), 2, n)
