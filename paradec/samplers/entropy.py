"""Dream's `alg="entropy"`. Ye et al., "Dream 7B", arXiv 2508.15487."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.dream import DreamSampler


@dataclass(frozen=True)
class Entropy(DreamSampler):
    """Score a position by the negative entropy of the distribution that its token is drawn from."""

    name = "entropy"
    summary = "the surest tokens by entropy, on Dream's time grid"
    reads = ("confidence", "negative_entropy")
    score = "negative_entropy"
