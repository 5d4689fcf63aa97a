"""Cost of a cache: counts for `Output.cost`, and a warning where it saved nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache

WORTHWHILE = 0.9
"""Share of the positions above which a cache is not worth its bookkeeping."""
FEW = 4
"""Forwards of a row below which a share says little."""
SHORT = 64
"""Positions below which one row on a CPU gains nothing from gathering single positions (benchmarks/caches.py)."""


@dataclass(frozen=True)
class CacheCost:
    """Forwards of a request. Lists have one entry per row."""

    cache: str
    full_forwards: list[int]
    """Calls that evaluated the row from end to end."""
    partial_forwards: list[int]
    """Calls that evaluated a part of it."""
    forwarded_tokens: list[int]
    """Positions evaluated in all branches, padding excluded. A prefix that all rows share is evaluated once, in a
    separate forward, and counted with the first row."""
    store_bytes: int
    """Peak bytes of keys and values, a shared prefix once."""
    reused_tokens: list[int]
    """Positions of each row with keys and values from a prefix, which no step evaluated."""
    share: float = 1.0
    """Positions evaluated, relative to as many whole forwards."""

    @classmethod
    def from_state(cls, state: Any, counts: np.ndarray, rows: slice = slice(None)) -> CacheCost:
        """Read what a state, or some of its rows, cost. counts: `State.counts`, of all rows."""
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
        """Why the cache was not worth it and what to use instead, or None."""
        if self.cache == "causal":  # the store of drafts is no choice
            return None
        calls = max(map(sum, zip(self.full_forwards, self.partial_forwards)), default=0)
        if not self.store_bytes or any(self.reused_tokens) or calls < FEW or self.share < WORTHWHILE:
            return None
        return (
            f"cache={self.cache!r} still evaluates {self.share:.0%} of the positions here: use cache='none', or a "
            "shorter block_length"
        )


def advice(cache: Cache, rows: int, positions: int, device: str = "cpu") -> str | None:
    """Why a cache is not worth it for rows of at most `positions`, and what to use instead, or None.

    On a GPU one row's calls are bound by launches and weights, not by positions; users of the public code report it
    slower there than no cache.
    """
    if not cache.costly_rows or rows > 1 or (device != "cuda" and positions >= SHORT):
        return None
    return (
        f"cache={cache.name!r} gathers single positions, which one row of {positions} positions on {device} hardly "
        "repays: use cache='dual' or 'vicinity', more rows, or cache='none'"
    )
