"""Which rows of a plan are evaluated in one call: parts of whole rows, of ranges and of any positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from paradec.caches.base import Part, level_rows


def whole_rows(state: Any, chosen: np.ndarray, most: int = 3, multiple: int = 1) -> list[Part]:
    """Parts that evaluate the `chosen` running rows from end to end, but for what was taken over from a prefix."""
    if multiple == 1 and (level := level_rows(state, chosen)) is not None:
        return level
    length = state.length[state.window.rows[chosen]]
    return spans(state, chosen, np.zeros_like(length), length, "rest" if state.reuses else "full", most, multiple)


def spans(
    state: Any, chosen: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str, most: int = 3, multiple: int = 1
) -> list[Part]:
    """Parts for the contiguous ranges [start, stop) of the `chosen` running rows, in at most `most` buckets.

    Args:
        chosen: [N] int64 indices into the running rows.
        start, stop: [N] int64 positions; what was taken over from a prefix is left out, and what does not exist for
            now. Rows with gaps become subsets.
        multiple: widths are rounded up to this, as far as the canvas goes.
    """
    if state.reuses:
        start = np.maximum(start, state.reused[state.window.rows[chosen]])
    if state.present is not None:
        column = np.arange(state.present.shape[1])
        there = state.present[state.window.rows[chosen]] & (column >= start[:, None]) & (column < stop[:, None])
        first, size = there.argmax(1), there.sum(1)
        if (there.shape[1] - there[:, ::-1].argmax(1) - first > size).any():
            return subsets(state, chosen, there, most, multiple)
        if kind == "full" and (first + size < stop).any():
            kind = "rest"
        start, stop = first, first + size
    groups = buckets(stop - start, exact=not state.pads, most=min(most, state.max_calls))
    return [
        Part.span(chosen[g], start[g], stop[g], kind, _rounded(state, stop[g] - start[g], multiple)) for g in groups
    ]


def subsets(state: Any, chosen: np.ndarray, needed: np.ndarray, most: int = 3, multiple: int = 1) -> list[Part]:
    """Parts for the positions `needed` [N, L] of the `chosen` running rows, in at most `most` buckets; what was taken
    over from a prefix is left out."""
    if state.reuses:
        needed = needed & (np.arange(needed.shape[1]) >= state.reused[state.window.rows[chosen], None])
    if state.present is not None:
        needed = needed & state.present[state.window.rows[chosen]]
    sizes = needed.sum(1)
    groups = buckets(sizes, exact=not state.pads, most=min(most, state.max_calls))
    return [Part.subset(chosen[g], needed[g], _rounded(state, sizes[g], multiple)) for g in groups]


def _rounded(state: Any, sizes: np.ndarray, multiple: int) -> int:
    return int(min(-(-sizes.max() // multiple) * multiple, state.canvas.shape[1]))


def outward(state: Any, rows: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of `rows` [N], widened to whole blocks of a block-causal model: inside one, positions see each other."""
    if state.facts.topology != "block_causal":
        return start, stop
    return state.facts.block_bounds(start, stop, state.prompt_length[rows])


def buckets(sizes: np.ndarray, exact: bool, most: int = 3, waste: float = 1.1) -> list[Any]:
    """Group rows by how many positions they need, so that none is padded far beyond its own need.

    Args:
        sizes: [R] int64 positions per row.
        exact: only rows of one size share a bucket (models that cannot be padded).
        most: at most so many buckets otherwise.
        waste: more buckets are made while those there are evaluate more than this many times the rows' own positions.

    Returns:
        Index arrays that partition range(R), widest bucket first.
    """
    if exact:
        return [np.flatnonzero(sizes == size) for size in np.unique(sizes)[::-1]]
    widest, total = sizes.max(), sizes.sum()
    if widest * len(sizes) <= waste * total or most == 1:
        return [np.arange(len(sizes))]
    order = np.argsort(-sizes, kind="stable")
    ordered, count = sizes[order], len(sizes)
    # best[i]: positions evaluated for ordered[i:] in one bucket; then in one bucket more, ordered[i:j] being the first
    best = np.append(ordered * (count - np.arange(count)), 0)
    first = np.arange(count + 1)
    widths = np.append(ordered, 0)[:, None] * (first[None, :] - first[:, None])
    widths = np.where(first[None, :] > first[:, None], widths, np.iinfo(np.int64).max // 2)
    cuts: list[np.ndarray] = []
    while len(cuts) < most - 1 and best[0] > waste * total:
        options = widths + best
        cuts.append(options.argmin(1))
        best = np.append(options.min(1)[:-1], 0)
    groups, begin = [], 0
    for cut in reversed(cuts):
        if begin < count:
            groups.append(np.sort(order[begin : cut[begin]]))
            begin = int(cut[begin])
    return groups if begin >= count else [*groups, np.sort(order[begin:])]
