"""Base of optional features of a request: callbacks of the decode loop."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np

Ends: TypeAlias = np.ndarray | None
"""Ends of rows by stop rules: [R] int64 positions (see `StopRule`), or None if no row ends."""


class Feature:
    """An optional feature of a request, stored in `state.features[name]`.

    The loop calls the features in the order of the dict. The callbacks of this class do nothing. Shapes: `R` running
    rows, `W` window positions. Fields with a dimension of rows declare it in their metadata (`paradec.core.rows`).

    Class attributes:
        why_rows_fixed: why rows of a state with this feature cannot be replaced; None if they can.
        why_host_only: why the device step does not support the feature (a format string with `{state}`), or None.
    """

    why_rows_fixed: ClassVar[str | None] = None
    why_host_only: ClassVar[str | None] = None

    def reads_window(self, state: Any) -> bool:
        """Whether this step also needs the logits of decided positions."""
        return False

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """Called after the running `rows` [N] have opened a block, at the start of the request and in commits."""

    def on_query(self, state: Any, part: Any, query: Any) -> None:
        """Complete the model call of one part of the cache's plan. The state does not change."""

    def on_propose(self, state: Any, proposal: Any) -> None:
        """Complete a proposal. The state does not change."""

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        """Complete a decision before it is written. The state does not change."""

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """Called after a step is written and counted, before full blocks and ended rows close. Returns whether the end
        of a block has changed. tokens: [R, W] int64, the window after the write. ends: from the stop rules."""
        return False


def overrides(sampler: Any, method: str) -> bool:
    """Whether a masked sampler overrides a method. (Importing `MaskedSampler` here would be circular.)"""
    return bool(getattr(type(sampler), method).__qualname__ != f"MaskedSampler.{method}")
