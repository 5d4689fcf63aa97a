"""Base classes of caches that store keys and values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from paradec.caches.base import Cache, Part
from paradec.caches.parts import full_parts, range_parts, subset_parts
from paradec.core.checks import check_bytes, check_choice, check_int
from paradec.core.rows import row_layout

STORE_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class StoredCache(Cache):
    """A cache that evaluates some rows whole (a refresh), and only some positions of each other row.

    Args:
        store_dtype: of keys and values, one of `STORE_DTYPES`; None is the model's own.
        max_memory: byte limit of the store, as a number or "2GB"; None is the device's memory.
        shape_multiple: round up widths of calls and of the visible store to multiples of this, so that shapes repeat
            (for captured graphs and compiled models); 1 pads nothing.
    """

    _: KW_ONLY
    store_dtype: str | None = None
    max_memory: int | None = None
    shape_multiple: int = 1

    def __post_init__(self) -> None:
        if self.store_dtype is not None:
            check_choice("store_dtype", self.store_dtype, STORE_DTYPES)
        object.__setattr__(self, "max_memory", check_bytes("max_memory", self.max_memory))
        check_int("shape_multiple", self.shape_multiple, low=1, high=2**20)

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        is_full = self.needs_refresh(state, state.window.rows)
        full_index, partial_index = np.flatnonzero(is_full), np.flatnonzero(~is_full)
        if not len(partial_index):
            return full_parts(state, full_index, multiple=self.shape_multiple)
        if not len(full_index):
            return self.partial(state, partial_index, picks, 3)
        # at most three calls per step: two of them for full or for partial rows, whichever pads less
        plans = [
            full_parts(state, full_index, count, self.shape_multiple)
            + self.partial(state, partial_index, picks, 3 - count)
            for count in ((1, 2) if len(full_index) > 1 else (1,))
        ]
        return min(plans, key=lambda parts: sum(part.positions.size for part in parts))

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """Choose the rows among the state's `rows` [R] that this step evaluates whole: [R] bool."""
        raise NotImplementedError(f"cache class {type(self).__name__} must define needs_refresh")

    def partial(self, state: Any, index: np.ndarray, picks: np.ndarray | None, limit: int) -> list[Part]:
        """Plan parts for the running rows `index` [N], which are not refreshed, in at most `limit` groups."""
        raise NotImplementedError(f"cache class {type(self).__name__} must define partial")


class RangeCache(StoredCache):
    """A cache whose partial steps evaluate one range per row."""

    def partial(self, state: Any, index: np.ndarray, picks: np.ndarray | None, limit: int) -> list[Part]:
        rows = state.window.rows[index]
        start, stop = self.range(state, rows)
        # the logits of position p are at p - shift
        start = np.maximum(np.minimum(start, state.block_start[rows] - state.facts.shift), 0)
        return range_parts(
            state, index, start, np.minimum(stop, state.length[rows]), "window", limit, self.shape_multiple
        )

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop, both [N] int64, of the range to evaluate, which may reach beyond the row."""
        raise NotImplementedError(f"cache class {type(self).__name__} must define range")


class SubsetCache(StoredCache):
    """A cache whose partial steps evaluate any set of positions."""

    gathers_positions = True

    def begin(self, state: Any) -> ChangeLog:
        return ChangeLog(state)

    def on_commit(self, state: Any, tokens: np.ndarray) -> None:
        state.cache_state.record(state, tokens)

    def partial(self, state: Any, index: np.ndarray, picks: np.ndarray | None, limit: int) -> list[Part]:
        rows = state.window.rows[index]
        needed = self.positions_to_evaluate(state, rows, None if picks is None else picks[index])
        needed &= np.arange(needed.shape[1]) < state.length[rows, None]
        return subset_parts(state, index, needed, limit, self.shape_multiple)

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        """Choose the positions of `rows` [N] to evaluate: [N, L] bool. Values after a row's end have no effect."""
        raise NotImplementedError(f"cache class {type(self).__name__} must define positions_to_evaluate")


@dataclass(init=False, eq=False)
class ChangeLog:
    """Copy of the canvas on the host, with the step that last changed each position."""

    canvas: np.ndarray = field(metadata=row_layout(columns=1, fill=-1))
    changed_at: np.ndarray = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: the row's step that changed the position; -1 for initial tokens."""

    def __init__(self, state: Any):
        self.canvas = state.canvas.cpu().numpy().copy()
        self.changed_at = np.full_like(self.canvas, -1)
        self.mask_id = state.facts.mask_token_id

    def record(self, state: Any, tokens: np.ndarray) -> None:
        """Record the window's new `tokens` [R, W]."""
        rows, positions = state.window.rows[:, None], state.window.host_positions
        is_changed = self.canvas[rows, positions] != tokens
        self.changed_at[rows, positions] = np.where(is_changed, state.row_step[rows], self.changed_at[rows, positions])
        self.canvas[rows, positions] = tokens

    def undecided(self, rows: np.ndarray) -> np.ndarray:
        """[N, L] bool."""
        return self.canvas[rows] == self.mask_id

    def is_stable(self, state: Any, rows: np.ndarray, delay: int = 1) -> np.ndarray:
        """Find positions that are decided and did not change in the last `delay` steps: [N, L] bool."""
        return ~self.undecided(rows) & (self.changed_at[rows] < state.row_step[rows, None] - delay)
