"""In which numbers the cells of a raster are decided: the sizes of an order's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from paradec.core.checks import check_int, shown

Sizes = int | Sequence[int] | None
"""Of groups: a list, or how many groups in the numbers of `group_sizes`, or None for an order's own."""
PUBLISHED: Mapping[int, Mapping[int, tuple[int, ...]]] = {
    256: {
        8: (1, 15, 24, 32, 40, 45, 49, 50),
        12: (1, 7, 11, 15, 19, 22, 25, 28, 30, 32, 33, 33),
        16: (1, 4, 6, 8, 11, 13, 15, 17, 19, 20, 22, 23, 24, 24, 24, 25),
        20: (1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 18, 19, 19, 20, 20, 20),
        24: (*range(1, 12), 11, 12, 13, 14, 14, 14, 15, 15, 16, 16, 16, 17, 17),
        32: (1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, *(10,) * 3, *(11,) * 4, *(12,) * 8),
    },
    1024: {
        32: (
            *(1, 4, 6, 9, 11, 13, 16, 18, 20, 23, 25, 27, 29, 31, 33, 35, 36, 38, 40, 41, 42, 44, 45, 46, 47, 48, 48),
            *(49, 49, 50, 50, 50),
        ),
        48: (
            *(*range(1, 23), 23, 23, 24, 25, 26, 26, 27, 28, 28, 29, 29, 30, 30, 31, 31, *(32,) * 3, *(33,) * 7),
            34,
        ),
    },
}
"""LPD's published numbers, by cells and groups."""
USUAL = {256: 20, 1024: 48}
"""Groups of LPD's published pictures, by cells."""


@lru_cache(maxsize=256)
def group_sizes(cells: int, groups: int | None = None) -> tuple[int, ...]:
    """In which numbers `cells` are decided in `groups` groups: LPD's published ones where there are such, else the
    published list that is likest (by groups per side of the picture) stretched to fit (`scaled`).

    Args:
        groups: 1 to `cells`; None is the published 20 of 256 cells and 48 of 1024, else 1.25 per cell of a side.

    Raises:
        ValueError: a number out of its range.
    """
    check_int("cells", cells, low=1)
    check_int("groups", groups, low=1, high=cells, none=True)
    if groups is None:
        groups = USUAL.get(cells, min(max(round(1.25 * math.sqrt(cells)), 1), cells))
    if groups in PUBLISHED.get(cells, {}):
        return PUBLISHED[cells][groups]
    density = groups / math.sqrt(cells)
    lists = [(abs(count / math.sqrt(size) - density), size, count) for size in PUBLISHED for count in PUBLISHED[size]]
    _, size, count = min(lists)
    return scaled(PUBLISHED[size][count], cells, groups)


def scaled(sizes: Sequence[int], cells: int, groups: int | None = None) -> tuple[int, ...]:
    """A list of sizes for another number of cells, in the same share of cells at the same share of groups; of at least
    one each. groups: as many as before by default, where there are cells for all."""
    groups = min(len(sizes) if groups is None else groups, cells)
    shares = np.concatenate(([0], np.cumsum(sizes))) / sum(sizes)
    at = np.linspace(0, len(sizes), groups + 1)
    ends = np.rint(np.interp(at, np.arange(len(shares)), shares) * cells).astype(int)
    for group in range(1, groups + 1):
        ends[group] = min(max(ends[group], ends[group - 1] + 1), cells - (groups - group))
    return tuple(np.diff(ends).tolist())


def check_sizes(sizes: Sizes, name: str = "sizes") -> Sizes:
    """Sizes as they are kept: an int, a tuple or None.

    Raises:
        ValueError: no such, or a size below 1.
    """
    if sizes is None or isinstance(sizes, int):
        check_int(name, sizes, low=1, none=True)
        return sizes
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"{name}={shown(sizes)} must be a number of groups, or the sizes of the groups")
    for size in sizes:
        check_int(name, size, low=1)
    return tuple(int(size) for size in sizes)


def sizes_for(sizes: Sizes, cells: int, own: tuple[int, ...], name: str = "sizes") -> tuple[int, ...]:
    """What sizes mean for a raster of `cells`. own: what None means.

    Raises:
        ValueError: more groups than cells, or a list that does not add up to them.
    """
    if sizes is None:
        return own
    if isinstance(sizes, int):
        check_int(name, sizes, low=1, high=cells)
        return group_sizes(cells, sizes)
    if sum(sizes) != cells:
        raise ValueError(f"{name}={shown(sizes)} add up to {sum(sizes)}; the picture has {cells} cells")
    return tuple(sizes)


def left_after(size: int, steps: int) -> np.ndarray:
    """MAR's numbers: [steps + 1] int64, the positions that are undecided before each step, and 0 after the last. Of
    `size` positions floor(size cos(pi / 2 (t + 1) / steps)) are left after step t, at least one fewer than before."""
    left = [size]
    for step in range(steps - 1):
        planned = int(math.floor(size * math.cos(math.pi / 2 * (step + 1) / steps)))
        left.append(min(max(planned, steps - 1 - step), left[-1] - 1))
    return np.array([*left, 0])
