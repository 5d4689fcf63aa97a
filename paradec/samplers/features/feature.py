"""Base of optional features of a request: callbacks of the decode loop."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np

Ends: TypeAlias = np.ndarray | None
"""Ends of rows by stop rules: [R] int64 positions (see `StopRule`), or None if no row ends."""


class Feature:
    """An optional feature of a request, stored in `state.features[name]`.

    The loop calls the features in the order of the dict. The callbacks of this base do nothing. `R` are the running
    rows, `W` the positions of the window. Fields with rows declare them in their metadata (`paradec.core.rows`).

    Class attributes:
        why_rows_fixed: why rows of a state with this feature cannot be replaced; None if they can.
        why_host_only: why the device step cannot serve the feature, with `{state}` filled in; None if it can.
    """

    why_rows_fixed: ClassVar[str | None] = None
    why_host_only: ClassVar[str | None] = None

    def reads_window(self, state: Any) -> bool:
        """Whether this step also needs the logits of decided positions."""
        return False

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """Called when the running `rows` [N] have opened a block: at the start of the request, and in commits."""

    def on_query(self, state: Any, part: Any, query: Any) -> None:
        """Complete the model call of one part of the cache's plan. The state does not change."""

    def on_propose(self, state: Any, proposal: Any) -> None:
        """Complete a proposal. The state does not change."""

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        """Complete a decision before it is written. The state does not change."""

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """Called after the write and the count of a step, before full blocks and ended rows close. Returns whether any
        block's end has changed. tokens: [R, W] int64, the window after the write. ends: from the stop rules."""
        return False


def overrides(sampler: Any, method: str) -> bool:
    """Whether a masked sampler overrides a method. (An import of `MaskedSampler` here would be circular.)"""
    return bool(getattr(type(sampler), method).__qualname__ != f"MaskedSampler.{method}")
