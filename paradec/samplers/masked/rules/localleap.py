"""LocalLeap (arXiv 2510.07081, and its generate.py for LLaDA)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import max_pool1d

from paradec.core.checks import check_at_most, check_int, check_number
from paradec.samplers.masked.loop import MaskedSampler, View


@dataclass(frozen=True)
class LocalLeap(MaskedSampler):
    """Per row, commit the anchors (masked positions with confidence >= anchor_threshold), every masked position with
    confidence >= relaxed_threshold within `radius` of an anchor, and always the most confident position.

    Args:
        anchor_threshold: tau, in [0, 1]; without an anchor the rule is `threshold`.
        relaxed_threshold: tau_r, in [0, anchor_threshold].
        radius: W, positions to each side of an anchor, at least 0.

    Decided positions are not anchors. Neighbourhoods end at the block's edges.
    """

    anchor_threshold: float = 0.9
    relaxed_threshold: float = 0.75
    radius: int = 4

    name = "localleap"
    paper = "LocalLeap"
    arxiv = "2510.07081"
    summary = "every token above a threshold; near such a token, every token above a lower threshold"
    device_step = True
    sweep = ({"relaxed_threshold": 0.6}, {"anchor_threshold": 0.7, "relaxed_threshold": 0.5})

    def __post_init__(self) -> None:
        check_number("anchor_threshold", self.anchor_threshold, low=0, high=1)
        check_number("relaxed_threshold", self.relaxed_threshold, low=0, high=1)
        check_at_most("relaxed_threshold", self.relaxed_threshold, "anchor_threshold", self.anchor_threshold)
        check_int("radius", self.radius, low=0)

    def select(self, view: View) -> Tensor:
        scores = view.scores
        anchors = scores >= self.anchor_threshold
        reach = min(self.radius, scores.shape[-1] - 1)
        is_near = max_pool1d(anchors.float().unsqueeze(1), 2 * reach + 1, stride=1, padding=reach).squeeze(1) > 0
        return anchors | is_near & (scores >= self.relaxed_threshold) | view.best(scores)
