"""Reuse of the keys and values of a prefix: those of an earlier request, and those kept for the next request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.kept_prefix import KeptPrefix, Reuse, keep_prefix
from paradec.caches.parts import widen_to_blocks
from paradec.core.query import CallCost
from paradec.core.trace import TraceStep
from paradec.samplers.features.feature import Ends, Feature


@dataclass
class PrefixReuse(Feature):
    """Prefix that a request reuses, and number of positions that the next request can reuse; either may be None."""

    reuse: Reuse | None
    num_reusable: np.ndarray | None
    """[B] int64. On block-causal models, these positions were evaluated after their blocks were full."""

    why_rows_fixed = "a reused or kept prefix is stored for all rows"
    why_host_only = "a reused or kept prefix is arranged on the host"

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        if self.num_reusable is not None:
            rows = proposal.rows
            self.num_reusable[rows] = widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])[0]
        return False

    def fill_store(self, state: Any, model: Any) -> None:
        """Copy the prefix into the store, or evaluate it; the evaluation counts as a forward of the first row."""
        reuse = self.reuse
        if reuse is None:
            return
        called = reuse.fill(state.store, model, state.stored_cache, state.causal_keys)
        state.reused, state.reuses = reuse.counts, True
        if not called:
            return
        first = (np.arange(state.batch) == 0).astype(np.int64)
        state._calls.append(
            CallCost(np.arange(state.batch), 1, first, np.full(state.batch, reuse.start) * first, False)
        )
        if state.trace is not None:
            state.trace.steps.append(TraceStep([], (reuse.start * first).tolist(), "prefix", [1] * state.batch))

    def kept_prefix(self, state: Any, model: Any) -> KeptPrefix | None:
        if self.num_reusable is None:
            return None
        return keep_prefix(state, model, None if self.reuse is None else self.reuse.prefix)
