"""What a cache is: a plan of the positions that are recomputed at each step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from paradec.core.registry import check_declared


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
    """"full" (from end to end: column = position), "rest" (all but what a kept prefix has, and what a suffix leaves
    out) or "window" (a part)."""

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64: positions of each row, padding excluded."""
        if self.valid is None:
            return np.full(len(self.positions), self.positions.shape[1])
        return self.valid.sum(1)

    @classmethod
    def span(cls, index: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str, width: int | None = None) -> Part:
        """The positions from `start` to `stop` (exclusive) of each row. All arrays: [N] int64."""
        size = stop - start
        width = size.max() if width is None else width
        positions = start[:, None] + np.arange(width)
        if size.min() == width:
            return cls(index, positions, None, kind)
        return cls(index, np.minimum(positions, stop[:, None] - 1), positions < stop[:, None], kind)

    @classmethod
    def subset(cls, index: np.ndarray, chosen: np.ndarray, width: int | None = None) -> Part:
        """The positions where `chosen` [N, L] bool is True; at least one per row."""
        size = chosen.sum(1)
        width = size.max() if width is None else width
        if len(index) == 1 and size[0] == width:
            return cls(index, np.flatnonzero(chosen[0])[None], None, "window")
        positions = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
        if size.min() == width:
            return cls(index, positions, None, "window")
        valid = np.arange(width) < size[:, None]
        last = np.take_along_axis(positions, size[:, None] - 1, 1)
        return cls(index, np.where(valid, positions, last), valid, "window")


@dataclass(frozen=True)
class CacheFacts:
    """What a cache is for and what it asks; `paradec.caches.table` derives from it what it can be combined with."""

    uses_store: bool = True
    """Whether keys and values are kept."""
    topologies: tuple[str, ...] = ("bidirectional", "block_causal")
    predictions: tuple[str, ...] = ("same", "shifted")
    """The models that it is for (see `paradec.core.facts`)."""
    exact_on: tuple[str, ...] = ()
    """Topologies on which every step's logits equal those without a cache, whatever the settings."""
    evaluates: str = "block"
    """What a step inside a block always evaluates: "block" (all of it), "undecided" (what is undecided in it), "some"
    (a part of that, one position at least), "picks" (what the sampler previewed) or "targets" (the same, where that is
    a set chosen before)."""
    steady: bool = True
    """Whether a step depends on nothing but the canvas and the block: not on which steps led there."""
    final_alone: bool = False
    """Whether what a step reads of the store is of finished blocks alone."""
    suffixes: bool = False
    """Whether it works with `paradec.Suffix`: its parts come from `whole_rows`, `spans` and `subsets`, which leave out
    what does not exist for now, and it keeps nothing beyond a block about what is after it."""
    needs_confidence: bool = False
    """Whether commits call `observe_confidence`."""


@dataclass(frozen=True)
class Cache:
    """A cache method: an immutable, validated value, like a sampler. Everything that changes is in the state.

    Class attributes:
        facts: what it is for and what it asks (`CacheFacts`).
        exact_when: when its logits equal those without a cache on other models than `facts.exact_on`, in words.
        costly_rows: whether partial steps gather positions one by one, which a single short row does not repay.
        device_step: whether the device step can ask for `range` with tensors in the place of arrays, or needs none.
            Subclasses say so again for themselves.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = "cache"
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    facts: ClassVar[CacheFacts] = CacheFacts()
    exact_when: ClassVar[str] = ""
    costly_rows: ClassVar[bool] = False
    device_step: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not isinstance(cls.facts, CacheFacts):
            raise TypeError(
                f"facts={cls.facts!r} of cache class {cls.__name__} must be a paradec.caches.base.CacheFacts"
            )
        cls.device_step = vars(cls).get("device_step", False)

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_declared("cache", cls)
        return super().__new__(cls)

    def exact_for(self, topology: str) -> bool:
        """Whether this cache, with its settings, changes no logits of a model of this topology."""
        return topology in self.facts.exact_on

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        """What to evaluate now, one part per shape bucket; together they cover every running row once.

        Args:
            picks: [R, K] int64 positions that the sampler will commit, in its order, -1 where there are fewer; given
                to caches that evaluate "picks".
        """
        raise NotImplementedError

    def begin(self, state: Any) -> Any:
        """What the cache keeps per request, in `state.cache_state`; `plan` reads it and `committed` changes it. Batches
        that are refilled take an array or tensor of B rows, or a dataclass whose fields say which have rows
        (`paradec.core.rows`)."""
        return None

    def observe_confidence(self, state: Any, confidence: np.ndarray, available: np.ndarray) -> None:
        """Called by a commit before `committed`, where a cache's facts say `needs_confidence`.

        Args:
            confidence: [R, W] float64, of the window's candidates; valid where they were `available` [R, W] bool.
        """

    def committed(self, state: Any, tokens: np.ndarray) -> None:
        """Called by a commit once the window [R, W] holds `tokens`, before steps are counted and blocks move."""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """The cache as plain data."""
        return {"cache": self.name} | {key: getattr(self, key) for key in self.settings()}


def level_rows(state: Any, chosen: np.ndarray) -> list[Part] | None:
    """The `chosen` running rows from end to end in one part; None where rows have several lengths, or not all of a row
    is evaluated."""
    if not state.level or state.reuses or state.present is not None:
        return None
    return [Part(chosen, state.columns[: len(chosen)], None, "full")]
