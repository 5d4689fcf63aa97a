"""Top-2 margin ("Train for the Worst, Plan for the Best", arXiv 2502.06768: top-K probability margin)."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.masked.loop import Needs
from paradec.samplers.masked.rules.low_confidence import LowConfidence


@dataclass(frozen=True)
class Margin(LowConfidence):
    """Commit as `low_confidence`, but score positions by the difference of the two largest probabilities under
    softmax(logits), at any temperature and for any drawn token. `topk_margin` is Dream's version."""

    name = "margin"
    paper = "Plan for the Best"
    arxiv = "2502.06768"
    summary = "the tokens with the largest lead over the second best, in equal numbers per step"
    device_step = True
    needs = Needs(score="margin")
