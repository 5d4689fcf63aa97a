"""Token statistics: what samplers want to know of a position's distribution, from one read of its logits.

Three paths compute the same numbers, and `path_for` says which one serves which logits:

- "float64": all of it in float64. For float64 logits, and for vocabularies so small that little is gained by another;
- "chunked": PyTorch in float32 over a few rows at a time that stay in the processor's cache. The CPU path;
- "triton": one kernel that reads every logit once, and a small one that joins the parts of a row where the vocabulary
  was split over programs.

Trained models are so confident of many positions that float32 probabilities tie at 1, and a rule that ranks them would
then go by position. So the float32 paths never add the best token's share to that of the others: with m the largest
logit, they sum `rest` = sum exp(z - m) and `weight` = sum exp(z - m) (z - m) over all other tokens, and the probability
1 / (1 + rest), the entropy ln(1 + rest) - weight / (1 + rest) and all else follow in float64. The entropy keeps
float32's relative precision as far down as float32 has numbers (1e-36), and 1 - p as far down as float64 goes.

A temperature divides differences to the largest logit only: these never overflow, whatever the logits, and what is far
below the best token comes to nothing, as it should.

Two such sums merge exactly (online softmax: Milakov and Gimelshein, arXiv 1805.02867), also where one is empty.

`reference.py` defines every statistic, `draws.py` how a token is drawn; `read.py` chooses a path and is "float64"
itself, `portable.py` is "chunked", in the memory of `memory.py`; `triton.py` the kernels; `api.py` checks what callers
ask for.
"""

from paradec.kernels import interpreting
from paradec.kernels.token_stats.api import PATHS, token_stats
from paradec.kernels.token_stats.draws import BELOW_ONE, TokenDraws, draw
from paradec.kernels.token_stats.memory import recycled, scratch
from paradec.kernels.token_stats.portable import RowReader, padded, stats_where
from paradec.kernels.token_stats.read import IN_ONE_READ, SMALL_VOCABULARY, path_for, read_stats
from paradec.kernels.token_stats.reference import EPSILON, FIELDS, TokenStats, reference_stats

__all__ = [
    "BELOW_ONE",
    "EPSILON",
    "FIELDS",
    "IN_ONE_READ",
    "PATHS",
    "SMALL_VOCABULARY",
    "RowReader",
    "TokenDraws",
    "TokenStats",
    "draw",
    "interpreting",
    "padded",
    "path_for",
    "read_stats",
    "recycled",
    "reference_stats",
    "scratch",
    "stats_where",
    "token_stats",
]
