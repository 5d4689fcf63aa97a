"""Orders: which positions of a raster are decided together, and which come first, as one value for all that ask.

An `Order` is a name and settings. For a raster of `height` x `width` cells and the draws of each row it says the
`Groups`: every cell once, group after group. Masked samplers, MAR, ZipAR and models that are fed groups (LPD, NAR) read
the same values.

| name | groups |
|---|---|
| `raster` | row by row |
| `random` | at random |
| `cosine` | at random, in MAR's numbers (arXiv 2406.11838) |
| `halton` | along a low-discrepancy sequence (arXiv 2503.17076) |
| `diagonal` | one anti-diagonal after the other (NAR, arXiv 2503.10696) |
| `zipar` | rows side by side, each a window after the one above (arXiv 2412.04062) |
| `lpd` | near what is decided and far from each other (arXiv 2507.01957) |
| `given` | as they are listed |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from paradec.core import rng
from paradec.core.checks import check_choice, check_int, check_number, shown
from paradec.core.registry import Component, Registry

# ---- draws ----------------------------------------------------------------------------------------------------------


class OrderDraws(Protocol):
    """Where an order takes a row's random choices from. Asked again, it answers the same."""

    def shuffle(self, step: int, cells: np.ndarray) -> np.ndarray:
        """`cells` [N] int64 in a random order, at this group."""
        ...

    def choose(self, step: int, cells: np.ndarray) -> int:
        """One of `cells` [N] int64, at this group."""
        ...


@dataclass(frozen=True)
class KeyedDraws:
    """Draws that are a function of a row's key, the group and the cell (`paradec.core.rng`). key: two 32-bit
    integers."""

    key: tuple[int, int]

    def shuffle(self, step: int, cells: np.ndarray) -> np.ndarray:
        return cells[self._numbers(step, cells)[:, 0].argsort(kind="stable")[::-1]]

    def choose(self, step: int, cells: np.ndarray) -> int:
        return int(cells[self._numbers(step, cells)[:, 1].argmax()])

    def _numbers(self, step: int, cells: np.ndarray) -> np.ndarray:
        key, positions = torch.tensor([self.key]), torch.as_tensor(np.array(cells)).unsqueeze(0)
        return rng.uniform(key, torch.tensor([step]), positions, 2, rng.POSITION_STREAM)[0].numpy()


def draws_from_keys(keys: Any) -> list[OrderDraws]:
    """Make the draws of every row from its key: [B, 2] int64."""
    return [KeyedDraws((int(first), int(second))) for first, second in keys.tolist()]


SINGLE_ROW: Sequence[OrderDraws] = (KeyedDraws((0, 0)),)
"""Draws of a single row."""


# ---- sizes of groups ------------------------------------------------------------------------------------------------

Sizes = int | Sequence[int] | None
"""Of groups: a list, or how many groups in the numbers of `group_sizes`, or None for an order's own."""
PUBLISHED_SIZES: Mapping[int, Mapping[int, tuple[int, ...]]] = {
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
        48: (*(*range(1, 23), 23, 23, 24, 25, 26, 26, 27, 28, 28, 29, 29, 30, 30, 31, 31, *(32,) * 3, *(33,) * 7), 34),
    },
}
"""LPD's published numbers, by cells and groups."""
DEFAULT_GROUPS = {256: 20, 1024: 48}
"""Groups of LPD's published pictures, by cells."""


@lru_cache(maxsize=256)
def group_sizes(cells: int, groups: int | None = None) -> tuple[int, ...]:
    """Sizes in which `cells` are decided in `groups` groups: LPD's published ones where there are such, else the
    published list that is likest (by groups per side of the picture) stretched to fit (`scale_sizes`).

    Args:
        groups: 1 to `cells`; None is the published 20 of 256 cells and 48 of 1024, else 1.25 per cell of a side.

    Raises:
        ValueError: a number out of its range.
    """
    check_int("cells", cells, low=1)
    check_int("groups", groups, low=1, high=cells, none=True)
    if groups is None:
        groups = DEFAULT_GROUPS.get(cells, min(max(round(1.25 * math.sqrt(cells)), 1), cells))
    if groups in PUBLISHED_SIZES.get(cells, {}):
        return PUBLISHED_SIZES[cells][groups]
    density = groups / math.sqrt(cells)
    lists = [
        (abs(count / math.sqrt(size) - density), size, count)
        for size in PUBLISHED_SIZES
        for count in PUBLISHED_SIZES[size]
    ]
    _, size, count = min(lists)
    return scale_sizes(PUBLISHED_SIZES[size][count], cells, groups)


def scale_sizes(sizes: Sequence[int], cells: int, groups: int | None = None) -> tuple[int, ...]:
    """A list of sizes for another number of cells, in the same share of cells at the same share of groups; of at least
    one each. groups: as many as before by default, where there are cells for all."""
    groups = min(len(sizes) if groups is None else groups, cells)
    shares = np.concatenate(([0], np.cumsum(sizes))) / sum(sizes)
    points = np.linspace(0, len(sizes), groups + 1)
    ends = np.rint(np.interp(points, np.arange(len(shares)), shares) * cells).astype(int)
    for group in range(1, groups + 1):
        ends[group] = min(max(ends[group], ends[group - 1] + 1), cells - (groups - group))
    return tuple(np.diff(ends).tolist())


def check_sizes(sizes: Sizes, name: str = "sizes") -> Sizes:
    """Check sizes; return an int, a tuple or None.

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


def resolve_sizes(sizes: Sizes, cells: int, default: tuple[int, ...], name: str = "sizes") -> tuple[int, ...]:
    """Resolve sizes for a raster of `cells`. default: for None.

    Raises:
        ValueError: more groups than cells, or a list that does not add up to them.
    """
    if sizes is None:
        return default
    if isinstance(sizes, int):
        check_int(name, sizes, low=1, high=cells)
        return group_sizes(cells, sizes)
    if sum(sizes) != cells:
        raise ValueError(f"{name}={shown(sizes)} add up to {sum(sizes)}; the picture has {cells} cells")
    return tuple(sizes)


def remaining_counts(size: int, steps: int) -> np.ndarray:
    """MAR's numbers: [steps + 1] int64, the positions that are undecided before each step, and 0 after the last. Of
    `size` positions floor(size cos(pi / 2 (t + 1) / steps)) are left after step t, at least one fewer than before."""
    left = [size]
    for step in range(steps - 1):
        planned = int(math.floor(size * math.cos(math.pi / 2 * (step + 1) / steps)))
        left.append(min(max(planned, steps - 1 - step), left[-1] - 1))
    return np.array([*left, 0])


# ---- cells one by one -----------------------------------------------------------------------------------------------

NUM_POINTS = 10_000
"""Points of Halton's sequence that are looked at, as in the public code; cells that none of them hits come last."""


@lru_cache(maxsize=64)
def halton_order(height: int, width: int) -> np.ndarray:
    """[height * width] int64: the rank of each cell, row by row. Point n of the two-dimensional Halton sequence (bases
    2 and 3, from n = 1) falls into a cell, its row by base 2; cells come in the order in which they are first hit."""
    n = np.arange(1, NUM_POINTS + 1)
    cells = (_radical_inverse(n, 2) * height).astype(int) * width + (_radical_inverse(n, 3) * width).astype(int)
    hit, first = np.unique(cells, return_index=True)
    rank = np.full(height * width, NUM_POINTS, np.int64)
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
            taken = [draws.choose(step, cells)]
            cells = cells[cells != taken[0]]
        if len(taken) < size:
            score = _nearness(known.reshape(height, width)).reshape(-1)
            cells = draws.shuffle(step, cells)
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
                taken += _sample_farthest(place, pool, taken, size - len(taken), step, draws)
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


def _sample_farthest(
    place: np.ndarray, pool: np.ndarray, taken: list[int], count: int, step: int, draws: OrderDraws
) -> list[int]:
    """`count` cells of a pool [N], each the farthest from what is taken so far; the first of several."""
    if len(pool) <= count:
        return pool.tolist()
    chosen: list[int] = []
    if not taken:
        chosen = [draws.choose(step, pool)]
        pool = pool[pool != chosen[0]]
    squares = ((place[pool][:, None] - place[[*taken, *chosen]][None]) ** 2).sum(-1).min(1)
    while len(chosen) < count:
        best = int(squares.argmax())
        chosen.append(int(pool[best]))
        squares = np.minimum(squares, ((place[pool] - place[pool[best]]) ** 2).sum(-1))
        squares[best] = -1
    return chosen


# ---- groups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Groups:
    """Every cell of a raster once, in groups that are decided together. `B` rows, `S` cells, `G` groups.

    Iterating gives the positions [B, n] int64 of each group.
    """

    order: np.ndarray
    """[B, S] int64, on the host: the cells, from the first to the last."""
    sizes: tuple[int, ...]
    """[G]: cells of each group, together S; the same in all rows."""

    @property
    def ends(self) -> np.ndarray:
        """[G] int64: cells that are decided after each group."""
        return np.cumsum(self.sizes)

    @property
    def num_left(self) -> np.ndarray:
        """[G + 1] int64: undecided cells before each group, and 0 after the last."""
        return self.order.shape[1] - np.concatenate(([0], self.ends))

    @property
    def rank(self) -> np.ndarray:
        """[B, S] int64: where each cell comes in the order."""
        return self.order.argsort(1)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, group: int) -> np.ndarray:
        """[B, n] int64: the positions of a group."""
        end = int(self.ends[group])
        return self.order[:, end - self.sizes[group] : end]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[group] for group in range(len(self)))


# ---- orders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order(Component):
    """An order: an immutable, validated value whose fields are its settings.

    Subclasses state `name` and `summary`, and implement `groups`.
    """

    kind: ClassVar[str] = "order"
    random: ClassVar[bool] = False
    """Whether rows differ by what they draw."""

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        """The groups of a raster of `height` x `width` cells, counted row by row.

        Args:
            draws: one for each row (`draws_from_keys`). Orders that are not `random` only count them.

        Raises:
            ValueError: settings that do not fit the raster; the message names them.
        """
        raise NotImplementedError

    def with_steps(self, steps: int | None) -> Order:
        """The same order in so many groups; None leaves them to the order.

        Raises:
            ValueError: an order that says itself how many there are.
        """
        if steps is None:
            return self
        name = "steps" if "steps" in self.settings() else "sizes"
        if getattr(self, name, 0) is not None:
            raise ValueError(f"steps={steps} has no meaning for {shown(self)}, which has its own groups: leave it out")
        return replace(self, **{name: steps})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Order:
        """Inverse of `to_dict`.

        Raises:
            ValueError: no mapping with a known name under "order", or a setting that does not fit it.
        """
        return registry.from_dict(data)


@dataclass(frozen=True)
class Sized(Order):
    """Orders whose groups are any part of a sequence of cells.

    Args:
        sizes: of the groups: a list, or how many in the numbers of `group_sizes`; None is one cell at a time.
    """

    sizes: Sizes = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", check_sizes(self.sizes))

    def sequence(self, height: int, width: int, draws: OrderDraws) -> np.ndarray:
        """[S] int64: one row's cells, from the first to the last."""
        raise NotImplementedError

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        sizes = resolve_sizes(self.sizes, height * width, (1,) * (height * width))
        distinct = draws if self.random else draws[:1]
        return Groups(_stack_rows([self.sequence(height, width, row) for row in distinct], len(draws)), sizes)


@dataclass(frozen=True)
class Raster(Sized):
    """Row by row, from left to right."""

    name = "raster"
    summary = "row by row"

    def sequence(self, height: int, width: int, draws: OrderDraws) -> np.ndarray:
        return np.arange(height * width)


@dataclass(frozen=True)
class Random(Sized):
    """A random order for each row."""

    name = "random"
    summary = "at random"
    random = True

    def sequence(self, height: int, width: int, draws: OrderDraws) -> np.ndarray:
        return draws.shuffle(0, np.arange(height * width))


@dataclass(frozen=True)
class Cosine(Order):
    """MAR's: a random order for each row, of which few cells come at first and many at last (`remaining_counts`).

    Args:
        steps: groups; None is 64, or as many as there are cells.
    """

    steps: int | None = None

    name = "cosine"
    summary = "at random, in MAR's numbers"
    random = True

    def __post_init__(self) -> None:
        check_int("steps", self.steps, low=1, none=True)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        cells = height * width
        check_int("steps", self.steps, low=1, high=cells, none=True)
        left = remaining_counts(cells, min(64, cells) if self.steps is None else self.steps)
        order = [row.shuffle(0, np.arange(cells)) for row in draws]
        return Groups(_stack_rows(order, len(draws)), tuple((-np.diff(left)).tolist()))


@dataclass(frozen=True)
class Halton(Sized):
    """Along the two-dimensional Halton sequence (`halton_order`)."""

    name = "halton"
    summary = "along a low-discrepancy sequence"

    def sequence(self, height: int, width: int, draws: OrderDraws) -> np.ndarray:
        return halton_order(height, width).argsort()


@dataclass(frozen=True)
class Diagonal(Order):
    """One anti-diagonal after the other, from the upper left; within one, rows from above. Sizes follow."""

    name = "diagonal"
    summary = "one anti-diagonal after the other"

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        row, column = np.divmod(np.arange(height * width), width)
        diagonal = row + column
        order = diagonal.argsort(kind="stable")
        return Groups(_stack_rows([order], len(draws)), tuple(np.bincount(diagonal).tolist()))


@dataclass(frozen=True)
class ZipAR(Order):
    """All open rows grow by one cell at a time; a row opens once `window` cells of the row above are there. Sizes
    follow.

    Args:
        window: the lead of a row over the next one, at least 1; from the width on it is `raster`.
    """

    window: int = 16

    name = "zipar"
    summary = "rows side by side, each a window after the one above"

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        row, column = np.divmod(np.arange(height * width), width)
        step = row * min(self.window, width) + column
        order = step.argsort(kind="stable")
        return Groups(_stack_rows([order], len(draws)), tuple(np.bincount(step).tolist()))


@dataclass(frozen=True)
class Given(Order):
    """An order that is listed, as published order files are.

    Args:
        cells: [S] int: the cells from the first to the last; or a list of such, one for each row.
        sizes: of the groups, as in the other orders.
    """

    cells: Sequence[int] | Sequence[Sequence[int]] = ()
    sizes: Sizes = None

    name = "given"
    summary = "as they are listed"

    def __post_init__(self) -> None:
        try:
            cells = np.array(self.cells)
        except ValueError:
            cells = np.empty(0)
        if cells.dtype.kind not in "iu" or cells.ndim not in (1, 2) or not cells.size:
            raise ValueError(f"cells={shown(self.cells)} must list every cell once, for all rows or for each")
        listed = cells.tolist()
        object.__setattr__(self, "cells", tuple(listed if cells.ndim == 1 else map(tuple, listed)))
        object.__setattr__(self, "sizes", check_sizes(self.sizes))

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        size, order = height * width, np.atleast_2d(np.array(self.cells, np.int64))
        if order.shape[1] != size or (np.sort(order, 1) != np.arange(size)).any():
            raise ValueError(f"cells={shown(self.cells)} must list each of {size} cells once")
        if len(order) not in (1, len(draws)):
            raise ValueError(f"cells lists {len(order)} orders for {len(draws)} rows; give one, or one for each row")
        return Groups(_stack_rows(list(order), len(draws)), resolve_sizes(self.sizes, size, (1,) * size))


@dataclass(frozen=True)
class LPD(Sized):
    """Locality-aware: each group near what was decided before it, its cells far from each other (`lpd_order`).

    Args:
        sizes: None is `group_sizes`: the published 20 groups of 256 cells and 48 of 1024.
        repulsion: the published code's; None is 2 below 1024 cells and 4 from there on. Its largest model has 3.
        proximity: the least nearness of a cell that counts as near.
    """

    repulsion: float | None = None
    proximity: float = 1.0

    name = "lpd"
    summary = "near what is decided and far from each other"
    random = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("repulsion", self.repulsion, low=0, none=True)
        check_number("proximity", self.proximity, low=0)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        size = height * width
        sizes = group_sizes(size) if self.sizes is None else resolve_sizes(self.sizes, size, ())
        apart = lpd_repulsion(size) if self.repulsion is None else self.repulsion
        order = [lpd_order(height, width, sizes, row, apart, self.proximity) for row in draws]
        return Groups(_stack_rows(order, len(draws)), sizes)


def _stack_rows(orders: Sequence[np.ndarray], count: int) -> np.ndarray:
    """[count, S] int64, not to be written to: one order for all rows, or one for each."""
    stacked = np.stack(orders) if orders else np.zeros((0, 0), np.int64)
    return np.broadcast_to(stacked, (count, stacked.shape[1]))


registry = Registry(
    "order", {order.name: order for order in (Raster, Random, Cosine, Halton, Diagonal, ZipAR, LPD, Given)}
)
names = registry.names
create = registry.create


def resolve_order(order: Any) -> Order:
    """An order from a name, its plain data, or an order.

    Raises:
        TypeError: none of these. ValueError: an unknown name, or data that is no order's.
    """
    if isinstance(order, str):
        return create(order)
    if isinstance(order, Mapping):
        return Order.from_dict(order)
    if not isinstance(order, Order):
        raise TypeError(f"order={shown(order)} must be a name or made by paradec.core.orders.create")
    return order


def check_request_order(name: str, value: Any) -> Any:
    """What a request keeps of an order: a name, an `Order`, or lists of places as tuples. Whether these are all of a
    row's is checked with the prompts.

    Raises:
        ValueError, TypeError: anything else; the message begins with `name`.
    """
    if isinstance(value, str):
        check_choice(name, value, ("random", "chain"))
    if isinstance(value, (str, Order)):
        return value
    if isinstance(value, Mapping):
        return Order.from_dict(value)
    several = isinstance(value, Sequence) and any(isinstance(row, Sequence) for row in value)
    rows = value if several else [value]
    if not all(isinstance(row, Sequence) and not isinstance(row, (str, bytes)) for row in rows):
        raise ValueError(
            f"{name}={shown(value)} must be 'random', 'chain', a list of places, a list of such lists, or made by "
            "paradec.core.orders.create"
        )
    for place in (place for row in rows for place in row):
        check_int(name, place, low=0)
    return tuple(map(tuple, rows)) if several else tuple(value)
