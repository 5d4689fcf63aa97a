"""Cells in order: Halton's sequence, and LPD's generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from paradec.core.order_draws import OrderDraws

POINTS = 10_000
"""Points of Halton's sequence that are looked at, as in the public code; cells that none of them hits come last."""


@lru_cache(maxsize=64)
def halton_order(height: int, width: int) -> np.ndarray:
    """[height * width] int64: the rank of each cell, row by row. Point n of the two-dimensional Halton sequence (bases
    2 and 3, from n = 1) falls into a cell, its row by base 2; cells come in the order in which they are first hit."""
    n = np.arange(1, POINTS + 1)
    cells = (_radical_inverse(n, 2) * height).astype(int) * width + (_radical_inverse(n, 3) * width).astype(int)
    hit, first = np.unique(cells, return_index=True)
    rank = np.full(height * width, POINTS, np.int64)
    rank[hit] = first
    rank[rank.argsort(kind="stable")] = np.arange(height * width)
    rank.setflags(write=False)
    return rank


def _radical_inverse(n: np.ndarray, base: int) -> np.ndarray:
    """The digits of n in `base`, mirrored at the point: the Halton sequence's coordinate in [0, 1)."""
    value, scale = np.zeros(len(n)), 1.0
    while n.any():
        scale /= base
        value, n = value + scale * (n % base), n // base
    return value


def lpd_repulsion(cells: int) -> float:
    """The published repulsion for pictures of so many cells: 2 at 256 pixels, 4 at 512."""
    return 2.0 if cells < 1024 else 4.0


def lpd_order(
    height: int,
    width: int,
    sizes: Sequence[int],
    draws: OrderDraws,
    repulsion: float = 2.0,
    proximity: float = 1.0,
    decided: np.ndarray | None = None,
) -> np.ndarray:
    """LPD's order of one picture (Zhang et al., "Locality-aware Parallel Decoding", arXiv 2507.01957, public code).

    The first cell is random. For each later group the undecided cells are shuffled and sorted by their nearness, the
    sum of 1 / distance over the decided cells among their eight neighbours. Those of at least `proximity` are walked
    through and taken, unless one within the Chebyshev distance `repulsion` was taken for this group. Where that leaves
    the group short, the others are taken by farthest-point sampling from what the group has.

    Args:
        sizes: of the groups, together the undecided cells. decided: [H * W] bool: cells that are there from the start,
            which the first group looks for as the later ones do; None is none. A first group of several cells takes its
            others by farthest-point sampling.

    Returns:
        [sum(sizes)] int64: the cells, from the first to the last.
    """
    known = np.zeros(height * width, bool) if decided is None else decided.copy()
    place = np.stack(np.divmod(np.arange(height * width), width), 1)
    order: list[int] = []
    for step, size in enumerate(sizes):
        cells, taken = np.flatnonzero(~known), list[int]()
        if not known.any():
            taken = [draws.one_of(step, cells)]
            cells = cells[cells != taken[0]]
        if len(taken) < size:
            score = _nearness(known.reshape(height, width)).reshape(-1)
            cells = draws.shuffled(step, cells)
            cells = cells[(-score[cells]).argsort(kind="stable")]
            near = score[cells] >= proximity
            skipped = []
            for cell in cells[near].tolist():
                if len(taken) == size:
                    break
                if taken and (np.abs(place[taken] - place[cell]).max(1) <= repulsion).any():
                    skipped.append(cell)
                else:
                    taken.append(cell)
            if len(taken) < size:  # all that are near were reached
                pool = np.array([*cells[~near].tolist(), *skipped], np.int64)
                taken += _farthest(place, pool, taken, size - len(taken), step, draws)
        known[taken] = True
        order += taken
    return np.array(order, np.int64)


def _nearness(known: np.ndarray) -> np.ndarray:
    """[H, W] float64: for each cell of known [H, W] bool the sum of 1 / distance over its known neighbours."""
    height, width = known.shape
    around = np.pad(known, 1).astype(int)

    def count(moves: Sequence[tuple[int, int]]) -> np.ndarray:
        return sum((around[1 + y : 1 + y + height, 1 + x : 1 + x + width] for y, x in moves), np.zeros_like(known, int))

    # counts first: equal neighbourhoods must have equal sums, whichever neighbour is which
    beside = count([(-1, 0), (1, 0), (0, -1), (0, 1)])
    across = count([(-1, -1), (-1, 1), (1, -1), (1, 1)])
    return beside + across / math.sqrt(2)


def _farthest(
    place: np.ndarray, pool: np.ndarray, taken: list[int], count: int, step: int, draws: OrderDraws
) -> list[int]:
    """`count` cells of a pool [N], each the farthest from what is taken so far; the first of several."""
    if len(pool) <= count:
        return pool.tolist()
    found: list[int] = []
    if not taken:
        found = [draws.one_of(step, pool)]
        pool = pool[pool != found[0]]
    squares = ((place[pool][:, None] - place[[*taken, *found]][None]) ** 2).sum(-1).min(1)
    while len(found) < count:
        best = int(squares.argmax())
        found.append(int(pool[best]))
        squares = np.minimum(squares, ((place[pool] - place[pool[best]]) ** 2).sum(-1))
        squares[best] = -1
    return found
