"""What a cache cost and what it can save: counts for `Output.cost`, and advice before the work."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.caches.base import Cache
from paradec.canvas import TextState

WORTHWHILE = 0.9
"""Share of the positions above which a cache is not worth its bookkeeping."""
SHORT = 64
"""Positions below which one row on a CPU gains nothing from gathering single positions (benchmarks/caches.py)."""


@dataclass(frozen=True)
class CacheCost:
    """What a request's forwards were, over its rows. Lists have one entry per row."""

    cache: str
    full_forwards: list[int]
    """Calls that evaluated the row from end to end."""
    partial_forwards: list[int]
    """Calls that evaluated a part of it."""
    forwarded_tokens: list[int]
    """Positions evaluated, padding excluded, both branches of a guidance pair. A prefix that all rows share is
    evaluated once, in a forward of its own, and counted with the first row."""
    store_bytes: int
    """Bytes of keys and values held at most, a shared prefix once."""
    reused_tokens: list[int]
    """Positions of each row that no step evaluated, since their keys and values came from a prefix."""

    @classmethod
    def of(cls, state: TextState) -> CacheCost:
        """Read the counts of a state."""
        return cls(
            cache=state.cache.name,
            full_forwards=state.full_forwards.tolist(),
            partial_forwards=(state.nfe - state.full_forwards).tolist(),
            forwarded_tokens=state.forwarded_tokens.tolist(),
            store_bytes=0 if state.store is None else state.store.peak_bytes,
            reused_tokens=state.reused.tolist(),
        )


def advice(cache: Cache, rows: int, prompt: int, new: int, block: int, steps: int, device: str = "cpu") -> str | None:
    """Why a cache cannot win for this shape and what to use instead, or None when it may.

    Args:
        rows: of the batch. prompt, new: the longest row's lengths. block: positions per block, about. steps: steps per
            block, about. device: "cpu", "cuda", ...
    """
    if not cache.uses_store:
        return None
    share = cache.share(prompt, new, min(block, new), max(steps, 1))
    if share >= WORTHWHILE:
        return (
            f"cache={cache.name!r} still evaluates about {share:.0%} of the positions here (prompt {prompt}, "
            f"{new} new tokens in blocks of {min(block, new)}): use cache='none', or a shorter block_length"
        )
    # on a GPU one row's calls are bound by their launches and the weights, not by positions; users of the public code
    # report it slower there than no cache
    if cache.costly_rows and rows == 1 and (device == "cuda" or prompt + new < SHORT):
        return (
            f"cache={cache.name!r} gathers single positions, which one row of {prompt + new} positions on {device} "
            "hardly repays: use cache='dual' or 'vicinity', more rows, or cache='none'"
        )
    return None
