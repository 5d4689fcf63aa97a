"""Token statistics: confidence, margin, entropy and samples of positions' distributions, from one read of the logits.

Three paths compute the same numbers; `path_for` chooses one:

- "float64": float64 throughout, for float64 logits and small vocabularies;
- "chunked": PyTorch in float32, in blocks of a few rows that stay in the processor's cache. The CPU path;
- "triton": one kernel that reads every logit once, and a small one that merges the parts of a row (online softmax:
  Milakov and Gimelshein, arXiv 1805.02867).

Trained models are so confident that float32 probabilities tie at 1, and a rule would then rank by position. So the
float32 paths never add the best token's weight to the others': with m the largest logit, they sum `rest` = sum exp(z -
m) and `weight` = sum exp(z - m) (z - m) over all other tokens; the probability 1 / (1 + rest), the entropy ln(1 + rest)
- weight / (1 + rest) and the other fields follow in float64. A temperature divides only differences between logits,
which never overflow.

`reference.py` defines every statistic, `draws.py` how a token is drawn; `read.py` chooses a path and is "float64",
`portable.py` is "chunked", `triton.py` the kernels; `api.py` validates arguments.
"""

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
