"""Token statistics: confidence, margin, entropy and samples, from one read of the logits.

Three paths compute the same numbers; `path_for` chooses one:

- "float64" (`read.py`): for float64 logits and small vocabularies;
- "chunked" (`portable.py`): PyTorch in float32, in blocks of rows, for CPUs;
- "triton" (`triton.py`): a kernel that reads every logit once, and a kernel that merges the parts of a row (online
  softmax: Milakov and Gimelshein, arXiv 1805.02867).

In float32, the best probabilities of trained models round to 1. So the float32 paths sum over all tokens except the
best. Let z be the logits, m the largest of them, S = sum exp(z - m) and W = sum exp(z - m) (z - m) over these tokens.
Then the best probability is 1 / (1 + S) and the entropy ln(1 + S) - W / (1 + S), computed in float64. A temperature
divides only differences of logits, which do not overflow; in the logsumexp, it also divides m.

`reference.py` defines every statistic; `draws.py` samples tokens; `api.py` checks arguments."""

from paradec.kernels import interpreting
from paradec.kernels.token_stats.api import PATHS, token_stats
from paradec.kernels.token_stats.draws import BELOW_ONE, TokenDraws, draw
from paradec.kernels.token_stats.portable import argmax
from paradec.kernels.token_stats.read import (
    IN_ONE_READ,
    QUANTITIES,
    SMALL_VOCABULARY,
    path_for,
    read_stats,
    token_statistics,
)
from paradec.kernels.token_stats.reference import EPSILON, FIELDS, TokenStats, reference_stats

__all__ = [
    "BELOW_ONE",
    "EPSILON",
    "FIELDS",
    "IN_ONE_READ",
    "PATHS",
    "QUANTITIES",
    "SMALL_VOCABULARY",
    "TokenDraws",
    "TokenStats",
    "argmax",
    "draw",
    "interpreting",
    "path_for",
    "read_stats",
    "reference_stats",
    "token_statistics",
    "token_stats",
]
