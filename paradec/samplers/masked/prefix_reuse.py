"""Keys and values that a request takes over from another one, and leaves for the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from paradec.caches.kept import Reuse
from paradec.core.protocol import CallCost
from paradec.core.trace import TraceStep
from paradec.samplers.masked.state import MaskedState


def take_over(state: MaskedState, reuse: Reuse, model: Any) -> None:
    """Put the prefix of a request into its store. One that is evaluated for that is a forward of every row's, whose
    positions are the first row's."""
    called = reuse.fill(state.store, model, state.stored_cache)
    state.reused, state.reuses, state._took_over = reuse.counts, True, reuse.kept
    if not called:
        return
    once = (np.arange(state.batch) == 0).astype(np.int64)
    state._calls.append(CallCost(np.arange(state.batch), 1, once, np.full(state.batch, reuse.start) * once, False))
    if state.trace is not None:
        state.trace.steps.append(TraceStep([], (reuse.start * once).tolist(), "prefix", [1] * state.batch))
