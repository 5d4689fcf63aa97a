"""What a cache is: a plan of the positions that are recomputed at each step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass
class Part:
    """Rows that are evaluated in one call, and which positions of each.

    Shapes: `N` rows, `Q` positions (the widest row's; the others are padded with `valid` False).
    """

    index: np.ndarray
    """[N] int64: which of the running rows."""
    positions: np.ndarray
    """[N, Q] int64, ascending; padding repeats the last one."""
    valid: np.ndarray | None
    """[N, Q] bool; None when nothing is padding."""
    kind: str
    """"full" (whole rows: column = position) or "window" (a part, over a store)."""

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64: positions of each row, padding excluded."""
        if self.valid is None:
            return np.full(len(self.positions), self.positions.shape[1])
        return self.valid.sum(1)

    @classmethod
    def span(cls, index: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str) -> Part:
        """The positions from `start` to `stop` (exclusive) of each row. All arrays: [N] int64."""
        size = stop - start
        width = size.max()
        positions = start[:, None] + np.arange(width)
        if size.min() == width:
            return cls(index, positions, None, kind)
        return cls(index, np.minimum(positions, stop[:, None] - 1), positions < stop[:, None], kind)


@dataclass(frozen=True)
class Cache:
    """A cache method: an immutable, validated value, like a sampler. Everything that changes is in the state."""

    name: ClassVar[str] = ""
    family: ClassVar[str] = "cache"
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    uses_store: ClassVar[bool] = True

    def plan(self, state: Any) -> list[Part]:
        """What to evaluate now, one part per shape bucket; together they cover every running row once."""
        raise NotImplementedError

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """The cache as plain data."""
        return {"cache": self.name} | {key: getattr(self, key) for key in self.settings()}


def spans(state: Any, chosen: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str, most: int = 3) -> list[Part]:
    """Parts for the contiguous ranges [start, stop) of the `chosen` running rows, in at most `most` buckets.

    Args:
        chosen: [N] int64 indices into the running rows.
        start, stop: [N] int64 positions.
    """
    groups = buckets(stop - start, exact=not state.pads, most=most)
    return [Part.span(chosen[g], start[g], stop[g], kind) for g in groups]


def buckets(sizes: np.ndarray, exact: bool, most: int = 3, waste: float = 1.5) -> list[np.ndarray]:
    """Group rows by how many positions they need, so that none is padded far beyond its own need.

    Args:
        sizes: [R] int64 positions per row.
        exact: only rows of one size share a bucket (models that cannot be padded).
        most: at most so many buckets otherwise.
        waste: a row joins a bucket while the bucket's widest row is at most this many times its size.

    Returns:
        Index arrays that partition range(R), widest bucket first.
    """
    if exact:
        return [np.flatnonzero(sizes == size) for size in np.unique(sizes)[::-1]]
    if sizes.min() * waste >= sizes.max():
        return [np.arange(len(sizes))]
    rest = np.ones(len(sizes), dtype=bool)
    groups: list[np.ndarray] = []
    while rest.any():
        widest = sizes[rest].max()
        member = rest & (sizes * waste >= widest) if len(groups) < most - 1 else rest.copy()
        groups.append(np.flatnonzero(member))
        rest &= ~member
    return groups
