"""No cache: every running row is evaluated whole, at every step. Exact for every model and sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache, CacheFacts, Part, level_rows
from paradec.caches.parts import whole_rows

ANY = ("bidirectional", "block_causal", "causal", "causal_context")


@dataclass(frozen=True)
class NoCache(Cache):
    """Evaluate whole sequences at every step."""

    name = "none"
    summary = "no cache: whole rows at every step; exact"
    device_step = True
    facts = CacheFacts(uses_store=False, topologies=ANY, exact_on=ANY, suffixes=True)

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        rows = np.arange(len(state.rows))
        return level_rows(state, rows) or whole_rows(state, rows)
