"""Top-2 margin ("Train for the Worst, Plan for the Best", arXiv 2502.06768: top-K probability margin)."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.masked.loop import Needs
from paradec.samplers.masked.rules.low_confidence import LowConfidence


@dataclass(frozen=True)
class Margin(LowConfidence):
    """As `low_confidence`, but scored by the difference of the two largest probabilities of softmax(logits), whatever
    the temperature and the token drawn. `topk_margin` is Dream's version."""

    name = "margin"
    paper = "Plan for the Best"
    arxiv = "2502.06768"
    summary = "the tokens furthest ahead of the second best, in equal numbers per step"
    device_step = True
    needs = Needs(score="margin")
