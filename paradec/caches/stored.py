"""What caches that keep keys and values share: some rows are refreshed, the others evaluated in part."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from paradec.caches.base import Cache, Part
from paradec.caches.parts import spans, subsets, whole_rows
from paradec.core.checks import LARGEST_INT64, check_choice, check_int
from paradec.core.rows import row_layout

STORE_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class StoredCache(Cache):
    """Base of the caches that keep keys and values: rows that are refreshed are evaluated whole, the others in part.

    Args:
        store_dtype: what keys and values are kept in, one of `STORE_DTYPES`; None keeps the model's own.
        max_memory: bytes that the store may take; None asks the device what is free.
        shape_multiple: widths of the calls and of the store's visible part are rounded up to this with padding, so
            that shapes repeat (for captured graphs and compiled models); 1 pads nothing.
    """

    _: KW_ONLY
    store_dtype: str | None = None
    max_memory: int | None = None
    shape_multiple: int = 1

    def __post_init__(self) -> None:
        if self.store_dtype is not None:
            check_choice("store_dtype", self.store_dtype, STORE_DTYPES)
        check_int("max_memory", self.max_memory, low=1, high=LARGEST_INT64, none=True)
        check_int("shape_multiple", self.shape_multiple, low=1, high=2**20)

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        fresh = self.refreshes(state, state.window.rows)
        whole, rest = np.flatnonzero(fresh), np.flatnonzero(~fresh)
        if not len(rest):
            return whole_rows(state, whole, multiple=self.shape_multiple)
        if not len(whole):
            return self.partial(state, rest, picks, 3)
        # three calls a step in all: two of whichever kind is less even
        ways = [
            whole_rows(state, whole, most, self.shape_multiple) + self.partial(state, rest, picks, 3 - most)
            for most in ((1, 2) if len(whole) > 1 else (1,))
        ]
        return min(ways, key=lambda parts: sum(part.positions.size for part in parts))

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[R] bool: which of the state's `rows` [R] are evaluated from end to end at this step."""
        raise NotImplementedError

    def partial(self, state: Any, chosen: np.ndarray, picks: np.ndarray | None, most: int) -> list[Part]:
        """Parts for the `chosen` [N] running rows, in at most `most` buckets."""
        raise NotImplementedError


class RangeCache(StoredCache):
    """A cache whose partial steps evaluate one contiguous range per row."""

    def partial(self, state: Any, chosen: np.ndarray, picks: np.ndarray | None, most: int) -> list[Part]:
        rows = state.window.rows[chosen]
        start, stop = self.range(state, rows)
        # the logits of position p are at p - shift
        start = np.maximum(np.minimum(start, state.block_start[rows] - state.facts.shift), 0)
        return spans(state, chosen, start, np.minimum(stop, state.length[rows]), "window", most, self.shape_multiple)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop [N] int64 of what is evaluated; may reach beyond the row."""
        raise NotImplementedError


class SubsetCache(StoredCache):
    """A cache whose partial steps evaluate any set of positions, chosen by what changed when."""

    costly_rows = True

    def begin(self, state: Any) -> ChangeLog:
        return ChangeLog(state)

    def committed(self, state: Any, tokens: np.ndarray) -> None:
        state.cache_state.note(state, tokens)

    def partial(self, state: Any, chosen: np.ndarray, picks: np.ndarray | None, most: int) -> list[Part]:
        rows = state.window.rows[chosen]
        needed = self.needed(state, rows, None if picks is None else picks[chosen])
        needed &= np.arange(needed.shape[1]) < state.length[rows, None]
        return subsets(state, chosen, needed, most, self.shape_multiple)

    def needed(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        """[N, L] bool: which positions of the state's `rows` are evaluated; may reach beyond a row."""
        raise NotImplementedError


@dataclass(init=False, eq=False)
class ChangeLog:
    """The host's copy of the canvas, and after which step each position took the token that it has now."""

    canvas: np.ndarray = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64."""
    changed_at: np.ndarray = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: the row's step; -1 for what was there from the start."""

    def __init__(self, state: Any):
        self.canvas = state.canvas.cpu().numpy().copy()
        self.changed_at = np.full_like(self.canvas, -1)
        self.mask_id = state.facts.mask_token_id

    def note(self, state: Any, tokens: np.ndarray) -> None:
        """The window [R, W] of the running rows now holds `tokens`."""
        rows, positions = state.window.rows[:, None], state.window.host_positions
        changed = self.canvas[rows, positions] != tokens
        self.changed_at[rows, positions] = np.where(changed, state.row_step[rows], self.changed_at[rows, positions])
        self.canvas[rows, positions] = tokens

    def undecided(self, rows: np.ndarray) -> np.ndarray:
        """[N, L] bool."""
        return self.canvas[rows] == self.mask_id

    def settled(self, state: Any, rows: np.ndarray, delay: int = 1) -> np.ndarray:
        """[N, L] bool: decided, and unchanged since `delay` steps before this one began."""
        return ~self.undecided(rows) & (self.changed_at[rows] < state.row_step[rows, None] - delay)
