"""No cache: every running row is evaluated whole, at every step. Exact for every model and sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache, Part, buckets


@dataclass(frozen=True)
class NoCache(Cache):
    """Evaluate whole sequences at every step."""

    name = "none"
    summary = "no cache: whole sequences at every step; exact"

    def plan(self, state: Any) -> list[Part]:
        return state.once("plan", lambda: self._plan(state))

    def _plan(self, state: Any) -> list[Part]:
        lengths = state.length[state.window.rows]
        return [
            Part(index, np.zeros(len(index), dtype=np.int64), lengths[index], "full")
            for index in buckets(lengths, exact=not state.pads)
        ]
