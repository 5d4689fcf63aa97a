"""No cache: every running row is evaluated whole, at every step. Exact for every model and sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paradec.caches.base import Cache, CacheFacts, Part, level_rows
from paradec.caches.parts import whole_rows
from paradec.core.contract import CanvasState

ANY = ("bidirectional", "block_causal", "causal", "causal_context")


@dataclass(frozen=True)
class NoCache(Cache):
    """Evaluate whole sequences at every step."""

    name = "none"
    summary = "no cache: whole rows at every step; exact"
    device_step = True
    facts = CacheFacts(uses_store=False, topologies=ANY, exact_on=ANY, suffixes=True)

    def plan(self, state: CanvasState, picks: np.ndarray | None = None) -> list[Part]:
        keep = state.while_rows_stay if state.present is None else state.while_blocks_stay
        parts: list[Part] = keep("plan", lambda: _whole(state))
        return parts


def _whole(state: CanvasState) -> list[Part]:
    rows = np.arange(len(state.window.rows))
    return level_rows(state, rows) or whole_rows(state, rows)
