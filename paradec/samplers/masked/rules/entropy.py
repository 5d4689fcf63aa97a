"""Dream's `alg="entropy"`. Ye et al., "Dream 7B", arXiv 2508.15487."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paradec.samplers.masked.rules.dream import DreamSampler


@dataclass(frozen=True)
class Entropy(DreamSampler):
    """Score a position by the negative entropy of the distribution that its token is drawn from. For small vocabularies
    1e-10 is added within the logarithm, as in the public code. For large vocabularies the score is the plain entropy in
    float32, which differs by at most 1e-10 per entry of the vocabulary."""

    name = "entropy"
    summary = "the most confident tokens by entropy, on Dream's time grid"
    device_step = True
    needs = replace(DreamSampler.needs, score="negative_entropy")
