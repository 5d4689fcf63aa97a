"""Hierarchical decoding: one token in every run of masks (dInfer, arXiv 2510.08666, and its HierarchyDecoder)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_number
from paradec.samplers.masked.loop import LAST, MaskedSampler, View


@dataclass(frozen=True)
class Hierarchy(MaskedSampler):
    """Per row, commit every position with confidence above `threshold`; the best position of each contiguous run of
    masked positions, if its confidence is above `low_threshold`; and always the row's best position.

    Args:
        threshold: confidence above which any position is committed, in [0, 1]; None commits only the best of each run.
        low_threshold: confidence that a run's best position must exceed, in [0, 1]; None sets no limit.

    Runs end at the block's edges. As in the public code, both comparisons are strict, and all equal maxima of a run are
    committed. The public code's threshold is None by default; 0.9 is Fast-dLLM's.
    """

    threshold: float | None = 0.9
    low_threshold: float | None = 0.4

    name = "hierarchy"
    paper = "dInfer"
    arxiv = "2510.08666"
    summary = "the most confident token of every run of masks, and every token above the threshold"
    device_step = True
    sweep = ({"low_threshold": 0.6}, {"threshold": 0.7, "low_threshold": 0.3})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1, none=True)
        check_number("low_threshold", self.low_threshold, low=0, high=1, none=True)

    def select(self, view: View) -> Tensor:
        scores = view.scores
        # number of decided positions up to each position: equal within a run (decided positions have the score -inf)
        run = (~view.candidates).cumsum(-1)
        peaks = torch.full_like(run, -torch.inf, dtype=scores.dtype)
        peaks = torch.cat((peaks, peaks[:, :1]), -1).scatter_reduce(-1, run, scores, "amax")
        low = LAST if self.low_threshold is None else self.low_threshold
        chosen = (scores == peaks.gather(-1, run)) & (scores > low)
        if self.threshold is not None:
            chosen = chosen | (scores > self.threshold)
        return chosen | view.best(scores)
