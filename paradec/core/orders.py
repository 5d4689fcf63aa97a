"""Orders: the groups of cells of a raster that are decided together, and their sequence.

An `Order` divides a raster of `height` x `width` cells into `Groups`; every cell belongs to one group. Masked samplers,
MAR, ZipAR and models that predict groups (LPD, NAR) use the same orders.

| name | groups |
|---|---|
| `raster` | row by row |
| `random` | at random |
| `cosine` | at random, with MAR's group sizes (arXiv 2406.11838) |
| `halton` | along a low-discrepancy sequence (arXiv 2503.17076) |
| `diagonal` | one anti-diagonal after the other (NAR, arXiv 2503.10696) |
| `zipar` | raster rows in parallel, each `window` cells behind the row above (arXiv 2412.04062) |
| `lpd` | near decided cells, and far from other cells of the group (arXiv 2507.01957) |
| `given` | as listed |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from paradec.core import rng
from paradec.core.checks import check_choice, check_int, check_number, short_repr
from paradec.core.registry import Component, Registry

# ---- draws ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OrderDraws:
    """Random choices for one row of a batch. They depend only on the row key, the group and the cell
    (`paradec.core.rng`). key: two 32-bit integers."""

    key: tuple[int, int]

    def shuffle(self, step: int, cells: np.ndarray) -> np.ndarray:
        """Put `cells` [N] int64 into a random order, for the group `step`."""
        return cells[self._draw_numbers(step, cells)[:, 0].argsort(kind="stable")[::-1]]

    def choose(self, step: int, cells: np.ndarray) -> int:
        """Choose one of `cells` [N] int64 at random, for the group `step`."""
        return int(cells[self._draw_numbers(step, cells)[:, 1].argmax()])

    def _draw_numbers(self, step: int, cells: np.ndarray) -> np.ndarray:
        key, positions = torch.tensor([self.key]), torch.as_tensor(np.array(cells)).unsqueeze(0)
        return rng.uniform(key, torch.tensor([step]), positions, 2, rng.POSITION_STREAM)[0].numpy()


def draws_from_keys(keys: Any) -> list[OrderDraws]:
    """Make the draws of each row from its key: [B, 2] int64."""
    return [OrderDraws((int(first), int(second))) for first, second in keys.tolist()]


SINGLE_ROW: Sequence[OrderDraws] = (OrderDraws((0, 0)),)


# ---- sizes of groups ------------------------------------------------------------------------------------------------

Sizes = int | Sequence[int] | None
"""Group sizes: a list of sizes, a number of groups (then `group_sizes` chooses), or None for the order's default."""
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
"""LPD's published group sizes, by number of cells and number of groups."""
DEFAULT_GROUPS = {256: 20, 1024: 48}
"""Number of groups in LPD's published images, by number of cells."""


@lru_cache(maxsize=256)
def group_sizes(cells: int, groups: int | None = None) -> tuple[int, ...]:
    """Return the sizes of `groups` groups that divide `cells` cells: LPD's published list for these two numbers. If
    there is none, the published list with the nearest ratio groups / sqrt(cells) is scaled by `scale_sizes`.

    Args:
        groups: 1 to `cells`. None: 20 for 256 cells and 48 for 1024 cells, as published; else 1.25 sqrt(cells).

    Raises ValueError for a number out of its range.
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
    """Scale a list of group sizes to another number of cells; every size is at least 1. groups: number of sizes to
    return, by default `len(sizes)`; at most `cells`."""
    groups = min(len(sizes) if groups is None else groups, cells)
    shares = np.concatenate(([0], np.cumsum(sizes))) / sum(sizes)
    positions = np.linspace(0, len(sizes), groups + 1)
    ends = np.rint(np.interp(positions, np.arange(len(shares)), shares) * cells).astype(int)
    for group in range(1, groups + 1):
        ends[group] = min(max(ends[group], ends[group - 1] + 1), cells - (groups - group))
    return tuple(np.diff(ends).tolist())


def check_sizes(sizes: Sizes, name: str = "sizes") -> Sizes:
    """Check sizes; return an int, a tuple or None. Raises ValueError for other types and sizes below 1."""
    if sizes is None or isinstance(sizes, int):
        check_int(name, sizes, low=1, none=True)
        return sizes
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"{name}={short_repr(sizes)} must be a number of groups, or the sizes of the groups")
    for size in sizes:
        check_int(name, size, low=1)
    return tuple(int(size) for size in sizes)


def resolve_sizes(sizes: Sizes, cells: int, default: tuple[int, ...], name: str = "sizes") -> tuple[int, ...]:
    """Return the group sizes for `cells` cells; `default` for None. Raises ValueError for sizes that do not fit."""
    if sizes is None:
        return default
    if isinstance(sizes, int):
        check_int(name, sizes, low=1, high=cells)
        return group_sizes(cells, sizes)
    if sum(sizes) != cells:
        raise ValueError(f"{name}={short_repr(sizes)} add up to {sum(sizes)}; the picture has {cells} cells")
    return tuple(sizes)


def remaining_counts(size: int, steps: int) -> np.ndarray:
    """MAR's schedule: [steps + 1] int64, the number of undecided cells before each step, and a final 0. Step t leaves
    floor(size cos(pi / 2 (t + 1) / steps)) cells undecided, but every step decides at least one cell."""
    counts = [size]
    for step in range(steps - 1):
        planned = int(math.floor(size * math.cos(math.pi / 2 * (step + 1) / steps)))
        counts.append(min(max(planned, steps - 1 - step), counts[-1] - 1))
    return np.array([*counts, 0])


# ---- sequences of cells ---------------------------------------------------------------------------------------------

NUM_POINTS = 10_000
"""Number of Halton points, as in the public code. Cells without a point come last in the order."""


@lru_cache(maxsize=64)
def halton_order(height: int, width: int) -> np.ndarray:
    """Rank the cells by the index of the first point of the Halton sequence that falls into each: [height * width]
    int64. Indices count from n = 1; base 2 gives the point's row, base 3 its column."""
    n = np.arange(1, NUM_POINTS + 1)
    cells = (_radical_inverse(n, 2) * height).astype(int) * width + (_radical_inverse(n, 3) * width).astype(int)
    hit, first = np.unique(cells, return_index=True)
    rank = np.full(height * width, NUM_POINTS, np.int64)
    rank[hit] = first
    rank[rank.argsort(kind="stable")] = np.arange(height * width)
    rank.setflags(write=False)
    return rank


def _radical_inverse(n: np.ndarray, base: int) -> np.ndarray:
    """Mirror the digits of n in `base` at the radix point: coordinates in [0, 1)."""
    value, scale = np.zeros(len(n)), 1.0
    while n.any():
        scale /= base
        value, n = value + scale * (n % base), n // base
    return value


def lpd_repulsion(cells: int) -> float:
    """Return the published repulsion: 2 for images of 256 x 256 pixels (256 cells), 4 for 512 x 512 (1024 cells)."""
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
    """LPD's order of one image (Zhang et al., "Locality-aware Parallel Decoding", arXiv 2507.01957, public code).

    The first cell is random. For each later group, the undecided cells are shuffled and sorted by nearness, descending.
    A cell's nearness is the sum of 1 / distance over the decided cells among its eight neighbours. Cells of nearness >=
    `proximity` are chosen in turn, except within the Chebyshev distance `repulsion` of a chosen cell of the group. If
    the group is still too small, farthest-point sampling completes it.

    Args:
        sizes: number of cells of each group; their sum is the number of undecided cells.
        decided: [H * W] bool: cells that are known from the start; None is no cell.

    Returns [sum(sizes)] int64: the cells in order.
    """
    is_decided = np.zeros(height * width, bool) if decided is None else decided.copy()
    coordinates = np.stack(np.divmod(np.arange(height * width), width), 1)
    order: list[int] = []
    for step, size in enumerate(sizes):
        cells, chosen = np.flatnonzero(~is_decided), list[int]()
        if not is_decided.any():
            chosen = [draws.choose(step, cells)]
            cells = cells[cells != chosen[0]]
        if len(chosen) < size:
            score = _nearness(is_decided.reshape(height, width)).reshape(-1)
            cells = draws.shuffle(step, cells)
            cells = cells[(-score[cells]).argsort(kind="stable")]
            is_near = score[cells] >= proximity
            skipped = []
            for cell in cells[is_near].tolist():
                if len(chosen) == size:
                    break
                if chosen and (np.abs(coordinates[chosen] - coordinates[cell]).max(1) <= repulsion).any():
                    skipped.append(cell)
                else:
                    chosen.append(cell)
            if len(chosen) < size:  # the near cells did not suffice
                pool = np.array([*cells[~is_near].tolist(), *skipped], np.int64)
                chosen += _sample_farthest(coordinates, pool, chosen, size - len(chosen), step, draws)
        is_decided[chosen] = True
        order += chosen
    return np.array(order, np.int64)


def _nearness(is_decided: np.ndarray) -> np.ndarray:
    """Sum 1 / distance over each cell's decided neighbours: from [H, W] bool to [H, W] float64."""
    padded = np.pad(is_decided, 1).astype(int)
    above, middle, below = padded[:-2], padded[1:-1], padded[2:]
    # add integer counts first, so that equal counts give equal floats
    adjacent = (above + below)[:, 1:-1] + middle[:, :-2] + middle[:, 2:]
    diagonal = (above + below)[:, :-2] + (above + below)[:, 2:]
    return adjacent + diagonal / math.sqrt(2)


def _sample_farthest(
    coordinates: np.ndarray, pool: np.ndarray, chosen_before: list[int], count: int, step: int, draws: OrderDraws
) -> list[int]:
    """Choose `count` cells of a pool [N] one by one: each time the cell whose distance to the nearest chosen cell is
    largest; the first of equals."""
    if len(pool) <= count:
        return pool.tolist()
    chosen: list[int] = []
    if not chosen_before:
        chosen = [draws.choose(step, pool)]
        pool = pool[pool != chosen[0]]
    distances = ((coordinates[pool][:, None] - coordinates[[*chosen_before, *chosen]][None]) ** 2).sum(-1).min(1)
    while len(chosen) < count:
        best = int(distances.argmax())
        chosen.append(int(pool[best]))
        distances = np.minimum(distances, ((coordinates[pool] - coordinates[pool[best]]) ** 2).sum(-1))
        distances[best] = -1
    return chosen


# ---- groups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Groups:
    """All cells of a raster in groups that are decided together: `B` rows of a batch, `S` cells, `G` groups. Iterating
    gives the cells [B, n] int64 of each group of size n."""

    order: np.ndarray
    """[B, S] int64, on the host: the cells in the order of their groups."""
    sizes: tuple[int, ...]
    """[G]: number of cells of each group, the same in all rows."""

    @property
    def ends(self) -> np.ndarray:
        """[G] int64: number of decided cells after each group."""
        return np.cumsum(self.sizes)

    @property
    def num_left(self) -> np.ndarray:
        """[G + 1] int64: number of undecided cells before each group, and a final 0."""
        return self.order.shape[1] - np.concatenate(([0], self.ends))

    @property
    def rank(self) -> np.ndarray:
        """[B, S] int64: index of each cell in `order`."""
        return self.order.argsort(1)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, group: int) -> np.ndarray:
        end = int(self.ends[group])
        return self.order[:, end - self.sizes[group] : end]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[group] for group in range(len(self)))


# ---- orders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order(Component):
    """An order: an immutable, validated value whose fields are its settings. Subclasses set `name` and `summary`, and
    implement `groups`."""

    kind: ClassVar[str] = "order"
    random: ClassVar[bool] = False
    """Whether the order depends on a row's draws."""

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        """Divide a raster into groups; cells are numbered in raster order. draws: one per row of the batch, from
        `draws_from_keys`; orders that are not `random` use only their number. Raises ValueError for settings that do
        not fit the raster."""
        raise NotImplementedError

    def with_steps(self, steps: int | None) -> Order:
        """Copy the order with `steps` groups. Raises ValueError for an order that fixes its number of groups."""
        if steps is None:
            return self
        name = "steps" if "steps" in self.settings() else "sizes"
        if getattr(self, name, 0) is not None:
            raise ValueError(
                f"steps={steps} has no meaning for {short_repr(self)}, which has its own groups: leave out steps"
            )
        return replace(self, **{name: steps})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Order:
        """Inverse of `to_dict`. Raises ValueError for an unknown name under "order" or a wrong setting."""
        return registry.from_dict(data)


@dataclass(frozen=True)
class Sized(Order):
    """Base of orders that cut a sequence of cells into groups. sizes: see `Sizes`; None is groups of one cell."""

    sizes: Sizes = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", check_sizes(self.sizes))

    def sequence(self, height: int, width: int, draws: OrderDraws) -> np.ndarray:
        """[S] int64: the cells of one row in order."""
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
    """MAR's order: random for each row, with small groups first and large groups last (`remaining_counts`). steps:
    number of groups; None is 64, or one group per cell if there are fewer than 64 cells."""

    steps: int | None = None

    name = "cosine"
    summary = "at random, with MAR's group sizes"
    random = True

    def __post_init__(self) -> None:
        check_int("steps", self.steps, low=1, none=True)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        cells = height * width
        check_int("steps", self.steps, low=1, high=cells, none=True)
        counts = remaining_counts(cells, min(64, cells) if self.steps is None else self.steps)
        order = [row.shuffle(0, np.arange(cells)) for row in draws]
        return Groups(_stack_rows(order, len(draws)), tuple((-np.diff(counts)).tolist()))


@dataclass(frozen=True)
class Halton(Sized):
    """Along the two-dimensional Halton sequence (`halton_order`)."""

    name = "halton"
    summary = "along a low-discrepancy sequence"

    def sequence(self, height: int, width: int, draws: OrderDraws) -> np.ndarray:
        return halton_order(height, width).argsort()


@dataclass(frozen=True)
class Diagonal(Order):
    """One anti-diagonal after the other, from the upper left; inside a diagonal from top to bottom."""

    name = "diagonal"
    summary = "one anti-diagonal after the other"

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        return ZipAR(window=1).groups(height, width, draws)


@dataclass(frozen=True)
class ZipAR(Order):
    """Each group has the next cell of every open raster row. A row opens once `window` cells above it are decided."""

    window: int = 16

    name = "zipar"
    summary = "raster rows in parallel, each `window` cells behind the row above"

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        row, column = np.divmod(np.arange(height * width), width)
        step = row * min(self.window, width) + column
        order = step.argsort(kind="stable")
        return Groups(_stack_rows([order], len(draws)), tuple(np.bincount(step).tolist()))


@dataclass(frozen=True)
class Given(Order):
    """An order that the user lists. cells: all S cells in order, or one such list for each row of the batch. sizes: see
    `Sizes`; None is groups of one cell."""

    cells: Sequence[int] | Sequence[Sequence[int]] = ()
    sizes: Sizes = None

    name = "given"
    summary = "as listed"

    def __post_init__(self) -> None:
        try:
            cells = np.array(self.cells)
        except ValueError:
            cells = np.empty(0)
        if cells.dtype.kind not in "iu" or cells.ndim not in (1, 2) or not cells.size:
            raise ValueError(f"cells={short_repr(self.cells)} must list every cell once, in one list or in one per row")
        lists = cells.tolist()
        object.__setattr__(self, "cells", tuple(lists if cells.ndim == 1 else map(tuple, lists)))
        object.__setattr__(self, "sizes", check_sizes(self.sizes))

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        size, order = height * width, np.atleast_2d(np.array(self.cells, np.int64))
        if order.shape[1] != size or (np.sort(order, 1) != np.arange(size)).any():
            raise ValueError(f"cells={short_repr(self.cells)} must list each of {size} cells once")
        if len(order) not in (1, len(draws)):
            raise ValueError(f"cells lists {len(order)} orders for {len(draws)} rows; give one, or one for each row")
        return Groups(_stack_rows(list(order), len(draws)), resolve_sizes(self.sizes, size, (1,) * size))


@dataclass(frozen=True)
class LPD(Sized):
    """Locality-aware order: cells near decided cells, and far from other cells of their group (`lpd_order`).

    Args:
        sizes: None is `group_sizes`.
        repulsion: None is the published 2 below 1024 cells, else 4; the largest public model uses 3.
        proximity: lowest nearness of a cell that counts as near.
    """

    repulsion: float | None = None
    proximity: float = 1.0

    name = "lpd"
    summary = "near decided cells, and far from other cells of the group"
    random = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("repulsion", self.repulsion, low=0, none=True)
        check_number("proximity", self.proximity, low=0)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = SINGLE_ROW) -> Groups:
        size = height * width
        sizes = group_sizes(size) if self.sizes is None else resolve_sizes(self.sizes, size, ())
        repulsion = lpd_repulsion(size) if self.repulsion is None else self.repulsion
        order = [lpd_order(height, width, sizes, row, repulsion, self.proximity) for row in draws]
        return Groups(_stack_rows(order, len(draws)), sizes)


def _stack_rows(orders: Sequence[np.ndarray], count: int) -> np.ndarray:
    """[count, S] int64, read-only: one order for all rows, or one for each."""
    stacked = np.stack(orders) if orders else np.zeros((0, 0), np.int64)
    return np.broadcast_to(stacked, (count, stacked.shape[1]))


registry = Registry(
    "order", {order.name: order for order in (Raster, Random, Cosine, Halton, Diagonal, ZipAR, LPD, Given)}
)
names = registry.names
create = registry.create


def resolve_order(order: Any) -> Order:
    """Convert a name or data to an `Order`. Raises TypeError for other types, ValueError for unknown names."""
    if isinstance(order, str):
        return create(order)
    if isinstance(order, Mapping):
        return Order.from_dict(order)
    if not isinstance(order, Order):
        raise TypeError(f"order={short_repr(order)} must be a name or made by paradec.core.orders.create")
    return order


def check_request_order(name: str, value: Any) -> Any:
    """Check a request's order: a name, an `Order` or its data, or lists of positions, which become tuples. Raises
    ValueError or TypeError for other values. That lists are complete is checked later, with the prompts."""
    if isinstance(value, str):
        check_choice(name, value, ("random", "chain"))
    if isinstance(value, (str, Order)):
        return value
    if isinstance(value, Mapping):
        return Order.from_dict(value)
    is_nested = isinstance(value, Sequence) and any(isinstance(row, Sequence) for row in value)
    rows = value if is_nested else [value]
    if not all(isinstance(row, Sequence) and not isinstance(row, (str, bytes)) for row in rows):
        raise ValueError(
            f"{name}={short_repr(value)} must be 'random', 'chain', a list of positions, a list of such lists, or made "
            "by paradec.core.orders.create"
        )
    for position in (position for row in rows for position in row):
        check_int(name, position, low=0)
    return tuple(map(tuple, rows)) if is_nested else tuple(value)
