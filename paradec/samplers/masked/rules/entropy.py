"""Dream's `alg="entropy"`. Ye et al., "Dream 7B", arXiv 2508.15487."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paradec.samplers.masked.rules.dream import DreamSampler


@dataclass(frozen=True)
class Entropy(DreamSampler):
    """Score a position by the negative entropy of the distribution that its token is drawn from. For small vocabularies
    1e-10 is added within the logarithm, as in the public code. For large vocabularies nothing is added, which changes
    the score by at most 1e-10 per entry of the vocabulary, and the score is computed in float32."""

    name = "entropy"
    summary = "the most confident tokens by entropy, on Dream's time grid"
    device_step = True
    needs = replace(DreamSampler.needs, score="negative_entropy")
