"""Entropy threshold (dParallel, arXiv 2509.26488, and its generate.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.core.checks import check_number
from paradec.samplers.masked.loop import MaskedSampler, Needs, View


@dataclass(frozen=True)
class EntropyThreshold(MaskedSampler):
    """Per row, commit the masked position of lowest entropy, and all others of the block with entropy <= threshold.

    Args:
        threshold: entropy of softmax(logits) in nats, at any temperature; at least 0. The paper uses 0.5, and 0.45 for
            code tasks, with models that are trained for the rule.

    The public code adds 1e-12 within the logarithm; here the entropy is exact.
    """

    threshold: float = 0.5

    name = "entropy_threshold"
    paper = "dParallel"
    arxiv = "2509.26488"
    summary = "every token with an entropy of at most the threshold, and the one with the lowest"
    device_step = True
    needs = Needs(score="minus_entropy")
    sweep = ({"threshold": 0.25}, {"threshold": 1.0})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0)

    def select(self, view: View) -> Tensor:
        return (view.scores >= -self.threshold) | view.best()
