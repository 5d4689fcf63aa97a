"""A batch of queries, cut at the blocks of their rows."""

from __future__ import annotations

import numpy as np


def pieces_of(begins: np.ndarray, computed: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each row's query where its blocks end.

    Args:
        begins: [R + 1] int: where the rows' queries begin in the batch, and where the last one ends.
        computed: [R] int: positions left of each row's query.

    Returns:
        rows [P], begins [P + 1] and ends [P], int32: whose piece it is, where it begins in the batch, and the position
        after it in its row.
    """
    rows, cuts, ends = [], [int(begins[0])], []
    for row in range(len(begins) - 1):
        first, left = int(begins[row]), int(computed[row])
        stop = left + int(begins[row + 1]) - first
        at = left
        while at < stop:
            at = min(stop, at - at % block + block)
            rows.append(row)
            cuts.append(first + at - left)
            ends.append(at)
    return tuple(np.array(found, np.int32) for found in (rows, cuts, ends))  # type: ignore[return-value]
