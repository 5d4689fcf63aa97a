"""The base of optional features of a request: at most five callbacks of the decode loop."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np

Ends: TypeAlias = np.ndarray | None
"""Where stop rules end rows: [R] int64 positions, or None where no row ends."""


class Feature:
    """An optional feature of a request, kept in `state.features[name]`.

    The loop calls the features of a request in the order of the dict; these callbacks do nothing. `R` are the running
    rows, `W` the positions of the window. Fields with rows say so in their metadata (`paradec.core.rows`).

    Class attributes:
        why_rows_stay: why rows of a state with it cannot be replaced; None where they can.
        host_only: why the device step cannot serve it; `{state}` is filled in. None where it can.
    """

    why_rows_stay: ClassVar[str | None] = None
    host_only: ClassVar[str | None] = None

    def reads_window(self, state: Any) -> bool:
        """Whether this step needs the logits of decided positions as well."""
        return False

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """Called when `rows` [N], which run, have opened a block; first when the request starts, then in commits."""

    def on_query(self, state: Any, part: Any, query: Any) -> None:
        """Complete the model call of one part of the cache's plan. The state does not change."""

    def on_propose(self, state: Any, proposal: Any) -> None:
        """Complete a proposal. The state does not change."""

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        """Complete a decision before it is written. The state does not change."""

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """Called after the write and the count of a step, before full blocks and ended rows close. Returns whether any
        block's end has changed. tokens: [R, W] int64, the window after the write. ends: where stop rules end rows."""
        return False


def overrides(sampler: Any, method: str) -> bool:
    """Whether a masked sampler overrides a method. (The base imports modules that import this.)"""
    return bool(getattr(type(sampler), method).__qualname__ != f"MaskedSampler.{method}")
