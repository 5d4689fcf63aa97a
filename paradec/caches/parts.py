"""Grouping of rows into calls that evaluate whole rows, ranges, or any positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from paradec.caches.base import Part, make_single_part


def full_parts(state: Any, index: np.ndarray, limit: int = 3, multiple: int = 1) -> list[Part]:
    """Make parts for all positions of the running rows `index` [N] that are not reused from a prefix."""
    if multiple == 1 and (parts := make_single_part(state, index)) is not None:
        return parts
    length = state.length[state.window.rows[index]]
    kind = "rest" if state.reuses else "full"
    return range_parts(state, index, np.zeros_like(length), length, kind, limit, multiple)


def range_parts(
    state: Any, index: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str, limit: int = 3, multiple: int = 1
) -> list[Part]:
    """Make parts for the ranges [start, stop) of running rows `index` [N], in at most `limit` groups, without positions
    of reused prefixes or outside suffix windows. kind: as `Part.kind`. multiple: widths are rounded up to multiples of
    this, at most to the canvas width."""
    if state.reuses:
        start = np.maximum(start, state.reused[state.window.rows[index]])
    if state.present is not None:
        column = np.arange(state.present.shape[1])
        is_present = state.present[state.window.rows[index]] & (column >= start[:, None]) & (column < stop[:, None])
        first, size = is_present.argmax(1), is_present.sum(1)
        if (is_present.shape[1] - is_present[:, ::-1].argmax(1) - first > size).any():  # with gaps
            return subset_parts(state, index, is_present, limit, multiple)
        if kind == "full" and (first + size < stop).any():
            kind = "rest"
        start, stop = first, first + size
    groups = group_by_size(stop - start, exact=not state.pads, limit=min(limit, state.max_calls))
    return [
        Part.span(index[g], start[g], stop[g], kind, _round_width(state, stop[g] - start[g], multiple)) for g in groups
    ]


def subset_parts(state: Any, index: np.ndarray, needed: np.ndarray, limit: int = 3, multiple: int = 1) -> list[Part]:
    """Make parts for the positions `needed` [N, L] bool of the running rows `index`, in at most `limit` groups.
    Positions of reused prefixes and outside suffix windows are left out."""
    if state.reuses:
        needed = needed & (np.arange(needed.shape[1]) >= state.reused[state.window.rows[index], None])
    if state.present is not None:
        needed = needed & state.present[state.window.rows[index]]
    sizes = needed.sum(1)
    groups = group_by_size(sizes, exact=not state.pads, limit=min(limit, state.max_calls))
    return [Part.subset(index[g], needed[g], _round_width(state, sizes[g], multiple)) for g in groups]


def _round_width(state: Any, sizes: np.ndarray, multiple: int) -> int:
    return int(min(-(-sizes.max() // multiple) * multiple, state.canvas.shape[1]))


def widen_to_blocks(state: Any, rows: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Widen ranges of `rows` [N] to whole blocks of block-causal models, whose positions see each other."""
    if state.facts.topology != "block_causal":
        return start, stop
    return state.facts.block_bounds(start, stop, state.prompt_length[rows])


def group_by_size(sizes: np.ndarray, exact: bool, limit: int = 3, waste: float = 1.1) -> list[Any]:
    """Group rows by size, with little padding. Returns index arrays that partition range(R), widest group first.

    sizes: [R] int64 positions per row. exact: one group per size, for models that cannot be padded.
    limit: maximum number of groups, unless `exact`. waste: groups are added while padding multiplies the number of
        positions by more than this."""
    if exact:
        return [np.flatnonzero(sizes == size) for size in np.unique(sizes)[::-1]]
    widest, total = sizes.max(), sizes.sum()
    if widest * len(sizes) <= waste * total or limit == 1:
        return [np.arange(len(sizes))]
    order = np.argsort(-sizes, kind="stable")
    ordered, count = sizes[order], len(sizes)
    # best[i]: positions evaluated for ordered[i:] in one group; each pass adds a group ordered[i:j]
    best = np.append(ordered * (count - np.arange(count)), 0)
    starts = np.arange(count + 1)
    costs = np.append(ordered, 0)[:, None] * (starts[None, :] - starts[:, None])  # of ordered[i:j], in positions
    costs = np.where(starts[None, :] > starts[:, None], costs, np.iinfo(np.int64).max // 2)
    cuts: list[np.ndarray] = []
    while len(cuts) < limit - 1 and best[0] > waste * total:
        options = costs + best
        cuts.append(options.argmin(1))
        best = np.append(options.min(1)[:-1], 0)
    groups, start = [], 0
    for cut in reversed(cuts):
        if start < count:
            groups.append(np.sort(order[start : cut[start]]))
            start = int(cut[start])
    return groups if start >= count else [*groups, np.sort(order[start:])]
