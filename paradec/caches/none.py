"""No cache: each step evaluates whole rows. Exact for every model and sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache, CacheFacts, Part, make_single_part
from paradec.caches.parts import full_parts

ANY = ("bidirectional", "block_causal", "causal", "causal_context")


@dataclass(frozen=True)
class NoCache(Cache):
    """Evaluate whole sequences at every step."""

    name = "none"
    summary = "no cache: whole rows at every step; exact"
    device_step = True
    facts = CacheFacts(uses_store=False, topologies=ANY, exact_on=ANY, supports_suffix=True)

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        index = np.arange(len(state.rows))
        return make_single_part(state, index) or full_parts(state, index)
