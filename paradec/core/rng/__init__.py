"""Counter-based random numbers: a draw is a function of (row key, step, position, number), not of history.

So a step that is repeated draws the same numbers, and a row draws the same numbers whatever its neighbours, its
padding or the device. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from paradec.core.rng.counter import POSITION_STREAM, TOKEN_STREAM, gumbel, philox, uniform
from paradec.core.rng.keys import row_keys

__all__ = ["POSITION_STREAM", "TOKEN_STREAM", "gumbel", "philox", "row_keys", "uniform"]
