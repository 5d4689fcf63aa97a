"""Dream's `alg="maskgit_plus"`. Ye et al., "Dream 7B", arXiv 2508.15487."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.masked.rules.dream import DreamSampler


@dataclass(frozen=True)
class MaskGitPlus(DreamSampler):
    """Score a position by the probability of its token in the distribution that the token is drawn from."""

    name = "maskgit_plus"
    summary = "the most confident tokens by probability, on Dream's time grid"
    device_step = True
