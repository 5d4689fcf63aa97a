"""No cache: every running row is evaluated whole, at every step. Exact for every model and sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache, Part, spans


@dataclass(frozen=True)
class NoCache(Cache):
    """Evaluate whole sequences at every step."""

    name = "none"
    summary = "no cache: whole rows at every step; exact"
    uses_store = False

    def plan(self, state: Any) -> list[Part]:
        return state.while_rows_stand("plan", lambda: whole_rows(state, np.arange(len(state.window.rows))))


def whole_rows(state: Any, chosen: np.ndarray, most: int = 3) -> list[Part]:
    """Parts that evaluate the `chosen` running rows from end to end."""
    length = state.length[state.window.rows[chosen]]
    return spans(state, chosen, np.zeros_like(length), length, "full", most)
