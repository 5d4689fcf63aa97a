"""Keys and values that a request takes over from another one, and leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.kept import Reuse
from paradec.caches.parts import outward
from paradec.core.protocol import CallCost
from paradec.core.trace import TraceStep
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker
from paradec.samplers.masked.views import MaskedProposal


@dataclass
class PrefixReuse(Tracker):
    """What a request takes over, and whether it counts what it leaves; one of the two may be None."""

    reuse: Reuse | None
    settled: np.ndarray | None

    fixed = "a prefix that is taken over or kept is laid out for all rows"
    host_only = "a prefix that is taken over or kept is laid out on the host"

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        rows = proposal.rows
        if self.settled is not None:
            self.settled[rows] = outward(state, rows, state.block_start[rows], state.block_end[rows])[0]


def take_over(state: MaskedState, reuse: Reuse, model: Any) -> None:
    """Put the prefix of a request into its store. One that is evaluated for that is a forward of every row's, whose
    positions are the first row's."""
    called = reuse.fill(state.store, model, state.stored_cache, state.causal_keys)
    state.reused, state.reuses = reuse.counts, True
    if not called:
        return
    once = (np.arange(state.batch) == 0).astype(np.int64)
    state._calls.append(CallCost(np.arange(state.batch), 1, once, np.full(state.batch, reuse.start) * once, False))
    if state.trace is not None:
        state.trace.steps.append(TraceStep([], (reuse.start * once).tolist(), "prefix", [1] * state.batch))
