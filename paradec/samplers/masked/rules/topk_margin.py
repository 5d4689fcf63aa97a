"""Dream's `alg="topk_margin"`. Ye et al., "Dream 7B", arXiv 2508.15487."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paradec.samplers.masked.rules.dream import DreamSampler


@dataclass(frozen=True)
class TopKMargin(DreamSampler):
    """Score a position by the margin between the two best tokens of the distribution that tokens are drawn from."""

    name = "topk_margin"
    summary = "the most confident tokens by top-2 margin, on Dream's time grid"
    device_step = True
    needs = replace(DreamSampler.needs, score="margin")
