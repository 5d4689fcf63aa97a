"""What few requests need beside canvas, open blocks and counters: each mechanism keeps its own in a `Tracker`."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor

TrackedState: TypeAlias = Any
"""The `MaskedState`, which knows this module."""
Ends: TypeAlias = np.ndarray | None
"""Where stop rules end rows, as `StopRule` says it."""


class Tracker:
    """One optional mechanism of a masked request: made only where the request asks for it, kept in `state.trackers`.

    The loop calls those that there are, in their order, at the points below; here, nothing happens at any of them. A
    `proposal` is a `MaskedProposal`, a `decision` a `Decision`; R are the running rows, W the positions of the window.
    A tracker's fields say which of them have rows (`paradec.core.rows`).
    """

    fixed: ClassVar[str | None] = None
    """Why rows of a state that has it cannot leave, and others take their place; None where they can."""
    host_only: ClassVar[str | None] = None
    """Why the device step cannot serve it, with what it names of `state` in braces; None where it can."""

    def attach(self, state: TrackedState) -> None:
        """Show what it keeps in the state, where others read it, under the same names."""
        state.__dict__.update(vars(self))

    def opened(self, state: TrackedState, rows: np.ndarray) -> None:
        """`rows` [N], which run, have opened a block."""

    def reads_window(self, state: TrackedState) -> bool:
        """Whether this step needs the logits of decided positions as well."""
        return False

    def asks(self, state: TrackedState, part: Any, query: Any, now: dict[str, Any]) -> None:
        """Complete the model call of one part of the cache's plan: `now` holds the fields in which it differs from
        `query`, which is kept from step to step."""

    def proposed(self, state: TrackedState, proposal: Any) -> None:
        """Complete a proposal before anybody sees it. The state does not change."""

    def decided(self, state: TrackedState, proposal: Any, decision: Any) -> None:
        """Complete what the method has decided, before it is written. The state does not change."""

    def writes(self, state: TrackedState, tokens: Tensor) -> None:
        """The window is about to hold `tokens` [R, W]."""

    def written(self, state: TrackedState, proposal: Any, decision: Any) -> None:
        """The window holds what was decided."""

    def committed(self, state: TrackedState, proposal: Any, found: dict[str, np.ndarray]) -> None:
        """A step was written, and is about to be counted. found: what the commit has read from the device."""

    def closing(self, state: TrackedState, proposal: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """A step was counted, and full blocks are about to close. Returns whether any block ends elsewhere than before.

        Args:
            tokens: [R, W], what the window holds.
        """
        return False
