"""Base of the caches: a plan of the positions that are recomputed at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from paradec.core.registry import Component, check_class


@dataclass
class Part:
    """Rows and positions that one model call evaluates. Shapes: `N` rows, `Q` positions of the widest row."""

    index: np.ndarray
    """[N] int64: indices of running rows."""
    positions: np.ndarray
    """[N, Q] int64, ascending; padding repeats a row's last position."""
    valid: np.ndarray | None
    """[N, Q] bool; None without padding."""
    kind: str
    """Positions: all ("full"), all but reused prefixes and masks outside a suffix window ("rest"), some ("window")."""

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64: number of positions of each row, without padding."""
        if self.valid is None:
            return np.full(len(self.positions), self.positions.shape[1])
        return self.valid.sum(1)

    @classmethod
    def span(cls, index: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str, width: int) -> Part:
        """Make the part of positions [start, stop) of each row; all arrays [N] int64. width: Q."""
        size = stop - start
        positions = start[:, None] + np.arange(width)
        if size.min() == width:
            return cls(index, positions, None, kind)
        return cls(index, np.minimum(positions, stop[:, None] - 1), positions < stop[:, None], kind)

    @classmethod
    def subset(cls, index: np.ndarray, chosen: np.ndarray, width: int) -> Part:
        """Make the part of the positions where `chosen` [N, L] bool is True, at least one per row. width: Q."""
        size = chosen.sum(1)
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
    """Properties from which `paradec.caches.table` derives the valid combinations."""

    uses_store: bool = True
    """Whether keys and values are stored."""
    topologies: tuple[str, ...] = ("bidirectional", "block_causal")
    predictions: tuple[str, ...] = ("same", "shifted")
    """Topologies and predictions of supported models (`paradec.core.facts`)."""
    exact_on: tuple[str, ...] = ()
    """Topologies for which every step's logits equal those without a cache, whatever the settings."""
    evaluates: str = "block"
    """Positions of the open block that every step evaluates: all ("block"), all undecided ("undecided"), some undecided
    ("some"), the sampler's preview ("picks"), or a set chosen earlier ("targets"). A step may evaluate more."""
    stateless: bool = True
    """Whether the evaluated positions do not depend on earlier steps; the first step of a row or block may differ."""
    reads_final_only: bool = False
    """Whether the stored keys and values that a step reads are only those of finished blocks."""
    supports_suffix: bool = False
    """Whether the cache works with `paradec.Suffix`. Its parts must come from `full_parts`, `range_parts` and
    `subset_parts`, and it must remember nothing about positions after a block when the block closes."""
    needs_confidence: bool = False
    """Whether `observe_confidence` is called before each commit."""


@dataclass(frozen=True)
class Cache(Component):
    """A cache method: an immutable, validated value, like a sampler.

    Class attributes:
        exact_when: further conditions, besides `facts.exact_on`, under which logits equal those without a cache; text.
        gathers_positions: whether partial steps gather single positions, which is slow for one short row.
        device_step: whether `compile=True` works; then a method `range` must accept tensors. Not inherited.
    """

    kind: ClassVar[str] = "cache"
    family: ClassVar[str] = "cache"
    facts: ClassVar[CacheFacts] = CacheFacts()
    exact_when: ClassVar[str] = ""
    gathers_positions: ClassVar[bool] = False
    device_step: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not isinstance(cls.facts, CacheFacts):
            raise TypeError(
                f"facts={cls.facts!r} of cache class {cls.__name__} must be a paradec.caches.base.CacheFacts"
            )
        cls.device_step = vars(cls).get("device_step", False)

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_class("cache", cls)
        return super().__new__(cls)

    def exact_for(self, topology: str) -> bool:
        """Whether the logits of models of this topology equal those without a cache."""
        return topology in self.facts.exact_on

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        """Plan the parts to evaluate, with every running row in exactly one part. picks: [R, K] int64 positions, padded
        with -1, from the sampler's `positions_for_cache` if `facts.evaluates` is "picks" or "targets"; else None."""
        raise NotImplementedError(f"cache class {type(self).__name__} must define plan")

    def begin(self, state: Any) -> Any:
        """Make `state.cache_state`, which `plan` reads and `on_commit` changes. In batches it must be an array of B
        rows, or a dataclass with row metadata (`paradec.core.rows`)."""
        return None

    def observe_confidence(self, state: Any, confidence: np.ndarray, available: np.ndarray) -> None:
        """Called before `on_commit` if `facts.needs_confidence`. confidence: [R, W] float64 of the candidates, valid
        where `available` [R, W] bool."""

    def on_commit(self, state: Any, tokens: np.ndarray) -> None:
        """Called when the window [R, W] has got `tokens`, before the step is counted and blocks move."""


def make_single_part(state: Any, index: np.ndarray) -> list[Part] | None:
    """Put the running rows `index` into one "full" part; None if lengths differ or positions are left out."""
    if not state.has_equal_lengths or state.reuses or state.present is not None:
        return None
    return [Part(index, state.columns[: len(index)], None, "full")]
