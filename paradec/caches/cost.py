"""Cost of a cache: counts for `Output.cost`, and advice if the cache saved little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache

MAX_SHARE = 0.9
"""`advice` calls a cache not worthwhile if it evaluates at least this share of the positions."""
MIN_CALLS = 4
"""If every row has fewer forwards, `advice` returns None."""
MIN_POSITIONS = 64
"""On a CPU, gathering some positions of one row pays off from this row length on (benchmarks/caches.py)."""


@dataclass(frozen=True)
class CacheCost:
    """Cost of a request's forwards with a cache; lists have one entry per row."""

    cache: str
    full_forwards: list[int]
    """Number of calls that evaluated the whole row."""
    partial_forwards: list[int]
    """Number of calls that evaluated a part of the row."""
    forwarded_tokens: list[int]
    """Number of positions evaluated in all branches, without padding. A shared prefix is evaluated once, in a separate
    forward, and counted for the first row."""
    store_bytes: int
    """Peak bytes of keys and values."""
    reused_tokens: list[int]
    """Number of each row's positions that were reused from a prefix."""
    share: float = 1.0
    """Positions evaluated, divided by the positions of the same number of forwards over whole rows."""

    @classmethod
    def from_state(cls, state: Any, counts: np.ndarray, rows: slice = slice(None)) -> CacheCost:
        """Read the cost of a state's rows. counts: `State.counts` of all rows."""
        nfe, row_forwards, forwarded, full = counts[:, rows]
        return cls(
            cache=state.cache.name,
            full_forwards=full.tolist(),
            partial_forwards=(nfe - full).tolist(),
            forwarded_tokens=forwarded.tolist(),
            store_bytes=0 if state.store is None else state.store.peak_bytes,
            reused_tokens=state.reused[rows].tolist(),
            share=int(forwarded.sum()) / max(1, int((row_forwards * state.length[rows]).sum())),
        )

    def advice(self) -> str | None:
        """Return why the cache was not worthwhile and what to use instead, or None."""
        if self.cache == "causal":  # users cannot choose another store for drafts
            return None
        calls = max(map(sum, zip(self.full_forwards, self.partial_forwards)), default=0)
        if not self.store_bytes or any(self.reused_tokens) or calls < MIN_CALLS or self.share < MAX_SHARE:
            return None
        return (
            f"cache={self.cache!r} still evaluates {self.share:.0%} of the positions here: use cache='none', or a "
            "shorter block_length"
        )


def why_not_worthwhile(cache: Cache, rows: int, positions: int, device: str = "cpu") -> str | None:
    """Return why a cache is not worthwhile for `rows` rows of at most `positions` positions and what to use instead, or
    None. On a GPU, kernel launches and weight reads dominate calls for one row, whatever its length."""
    if not cache.gathers_positions or rows > 1 or (device != "cuda" and positions >= MIN_POSITIONS):
        return None
    return (
        f"cache={cache.name!r} gathers single positions, which is slow for one row of {positions} positions on "
        f"{device}: use cache='dual' or 'vicinity', more rows, or cache='none'"
    )
