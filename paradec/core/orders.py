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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from paradec.core.checks import check_choice, check_int, check_number, shown
from paradec.core.order_cells import halton_order, lpd_order, lpd_repulsion
from paradec.core.order_draws import ONE, OrderDraws
from paradec.core.order_sizes import Sizes, check_sizes, group_sizes, left_after, sizes_for
from paradec.core.protocol import plain
from paradec.core.registry import Registry

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
    def left(self) -> np.ndarray:
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
class Order:
    """An order: an immutable, validated value whose fields are its settings.

    Subclasses state `name` and `summary`, and implement `groups`.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    random: ClassVar[bool] = False
    """Whether rows differ by what they draw."""

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        """The groups of a raster of `height` x `width` cells, counted row by row.

        Args:
            draws: one of each row (`keyed`), which orders that are not `random` only count; a single row by default.

        Raises:
            ValueError: settings that do not fit the raster; the message names them.
        """
        raise NotImplementedError

    def planned(self, steps: int | None) -> Order:
        """The same order in so many groups; None leaves them to the order.

        Raises:
            ValueError: an order that says itself how many there are.
        """
        if steps is None:
            return self
        name = "steps" if "steps" in self.settings() else "sizes"
        if getattr(self, name, 0) is not None:
            raise ValueError(f"steps={steps} has no meaning for {shown(self)}, which has its own groups: leave it out")
        return self.but(**{name: steps})

    def but(self, **settings: Any) -> Order:
        """The same order with other settings.

        Raises:
            ValueError: one that it does not have, or out of its range.
        """
        return registry.create(self.name, **{name: getattr(self, name) for name in self.settings()} | settings)

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default."""
        return {field.name: field.default for field in fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """The order as plain data: its name under "order", then every setting."""
        return {"order": self.name} | {name: plain(getattr(self, name)) for name in self.settings()}

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

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        sizes = sizes_for(self.sizes, height * width, (1,) * (height * width))
        return Groups(_rows([self.sequence(height, width, row) for row in self._distinct(draws)], len(draws)), sizes)

    def _distinct(self, draws: Sequence[OrderDraws]) -> Sequence[OrderDraws]:
        return draws if self.random else draws[:1]


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
        return draws.shuffled(0, np.arange(height * width))


@dataclass(frozen=True)
class Cosine(Order):
    """MAR's: a random order for each row, of which few cells come at first and many at last (`left_after`).

    Args:
        steps: groups; None is 64, or as many as there are cells.
    """

    steps: int | None = None

    name = "cosine"
    summary = "at random, in MAR's numbers"
    random = True

    def __post_init__(self) -> None:
        check_int("steps", self.steps, low=1, none=True)

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        cells = height * width
        check_int("steps", self.steps, low=1, high=cells, none=True)
        left = left_after(cells, min(64, cells) if self.steps is None else self.steps)
        order = [row.shuffled(0, np.arange(cells)) for row in draws]
        return Groups(_rows(order, len(draws)), tuple((-np.diff(left)).tolist()))


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

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        row, column = np.divmod(np.arange(height * width), width)
        diagonal = row + column
        order = diagonal.argsort(kind="stable")
        return Groups(_rows([order], len(draws)), tuple(np.bincount(diagonal).tolist()))


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

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        row, column = np.divmod(np.arange(height * width), width)
        step = row * min(self.window, width) + column
        order = step.argsort(kind="stable")
        return Groups(_rows([order], len(draws)), tuple(np.bincount(step).tolist()))


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

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        size, order = height * width, np.atleast_2d(np.array(self.cells, np.int64))
        if order.shape[1] != size or (np.sort(order, 1) != np.arange(size)).any():
            raise ValueError(f"cells={shown(self.cells)} must list each of {size} cells once")
        if len(order) not in (1, len(draws)):
            raise ValueError(f"cells lists {len(order)} orders for {len(draws)} rows; give one, or one for each row")
        return Groups(_rows(list(order), len(draws)), sizes_for(self.sizes, size, (1,) * size))


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

    def groups(self, height: int, width: int, draws: Sequence[OrderDraws] = ONE) -> Groups:
        size = height * width
        sizes = group_sizes(size) if self.sizes is None else sizes_for(self.sizes, size, ())
        apart = lpd_repulsion(size) if self.repulsion is None else self.repulsion
        order = [lpd_order(height, width, sizes, row, apart, self.proximity) for row in draws]
        return Groups(_rows(order, len(draws)), sizes)


def _rows(orders: Sequence[np.ndarray], count: int) -> np.ndarray:
    """[count, S] int64, not to be written to: one order for all rows, or one for each."""
    found = np.stack(orders) if orders else np.zeros((0, 0), np.int64)
    return np.broadcast_to(found, (count, found.shape[1]))


registry = Registry(
    "order", {order.name: order for order in (Raster, Random, Cosine, Halton, Diagonal, ZipAR, LPD, Given)}
)
names = registry.names
create = registry.create


def resolve(order: Any) -> Order:
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


def order_of(name: str, value: Any) -> Any:
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
