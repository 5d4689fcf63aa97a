"""What a cache is: a plan of the positions that are recomputed at each step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass
class Part:
    """Rows that are evaluated in one call, and the positions of each.

    Shapes: `R` rows, `Q` positions (the widest row's; the others are padded).
    """

    index: np.ndarray
    """[R] int64: which of the window's rows."""
    start: np.ndarray
    """[R] int64: first position evaluated."""
    stop: np.ndarray
    """[R] int64: end (exclusive) of the positions evaluated."""
    kind: str
    """"full" or "window"."""


@dataclass(frozen=True)
class Cache:
    """A cache method: an immutable, validated value, like a sampler. Everything that changes is in the state."""

    name: ClassVar[str] = ""
    family: ClassVar[str] = "cache"
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    summary: ClassVar[str] = ""

    def plan(self, state: Any) -> list[Part]:
        """What to evaluate now, one part per shape bucket; together they cover every row of the window."""
        raise NotImplementedError

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """The cache as plain data."""
        return {"cache": self.name} | {key: getattr(self, key) for key in self.settings()}


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
    rest = np.ones(len(sizes), dtype=bool)
    groups: list[np.ndarray] = []
    while rest.any():
        widest = sizes[rest].max()
        member = rest & (sizes * waste >= widest) if len(groups) < most - 1 else rest.copy()
        groups.append(np.flatnonzero(member))
        rest &= ~member
    return groups
