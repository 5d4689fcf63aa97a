"""Keys and values that a request takes over from another one, and leaves for the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from paradec.caches.kept import KeptPrefix, Reuse, keep_prefix
from paradec.caches.parts import outward
from paradec.core.protocol import CallCost
from paradec.core.trace import TraceStep
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker
from paradec.samplers.masked.views import MaskedProposal


class PrefixReuse(Tracker):
    """What a request takes over (`reuse`), and what it keeps (`settled` [B] int64: on block-causal models, all left of
    it was evaluated after its blocks were full); either may be None."""

    fixed = "a prefix that is taken over or kept is laid out for all rows"
    host_only = "a prefix that is taken over or kept is laid out on the host"

    def __init__(self, reuse: Reuse | None, settled: np.ndarray | None):
        self.reuse = reuse
        self.settled = settled

    @property
    def start(self) -> int:
        """Positions that the rows' own store leaves out."""
        return 0 if self.reuse is None else self.reuse.start

    def attach(self, state: MaskedState) -> None:
        state.prefix_reuse, state.settled = self, self.settled
        if self.reuse is not None:
            state.reused, state.reuses = self.reuse.counts, True

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        rows = proposal.rows
        if self.settled is not None:
            self.settled[rows] = outward(state, rows, state.block_start[rows], state.block_end[rows])[0]

    def kept(self, state: MaskedState, model: Any) -> KeptPrefix | None:
        """What the next request can take over, if that was asked for."""
        if self.settled is None:
            return None
        return keep_prefix(state, model, None if self.reuse is None else self.reuse.kept)

    def fill(self, state: MaskedState, model: Any) -> None:
        """Put the prefix of a request into its store. One that is evaluated for that is a forward of every row's, whose
        positions are the first row's."""
        reuse = self.reuse
        if reuse is None or not reuse.fill(state.store, model, state.stored_cache):
            return
        once = (np.arange(state.batch) == 0).astype(np.int64)
        state._calls.append(CallCost(np.arange(state.batch), 1, once, np.full(state.batch, reuse.start) * once, False))
        if state.trace is not None:
            state.trace.steps.append(TraceStep([], (reuse.start * once).tolist(), "prefix", [1] * state.batch))
