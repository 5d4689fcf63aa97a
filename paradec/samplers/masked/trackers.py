"""What few requests need beside canvas, open blocks and counters: each mechanism keeps its own in a `Tracker`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
from torch import Tensor

from paradec.core import rows as of_rows

if TYPE_CHECKING:
    from paradec.caches.kept import Reuse
    from paradec.caches.suffix import Suffix
    from paradec.core.contract import AttentionState
    from paradec.samplers.masked.holes import Holes
    from paradec.samplers.masked.state import MaskedState
    from paradec.samplers.masked.stopping import EarlyRule
    from paradec.samplers.masked.views import Decision, MaskedProposal


Ends: TypeAlias = np.ndarray | None
"""Where stop rules end rows, as `StopRule` says it."""


class Tracked:
    """What trackers let the loop know by name (`Tracker.attach`), as it is without them; beside what `CanvasState` has
    for everybody (`present`, `pipelined`, `generator`, `logprobs`, `reuses`, `settled`)."""

    early_rules: tuple[EarlyRule, ...] = ()
    """With any, the window reaches to the end of every row."""
    watched: tuple[str, ...] = ()
    """Quantities that these rules read."""
    opening: np.ndarray | None = None
    """[B] bool: rows whose block ends where this step's logits say; until then it is all that the policy reads."""
    holes: Holes | None = None
    decided_at: Tensor | None = None
    """[B, L] int64: the row's step after which each position took its token, -1 where it was given or is undecided."""
    suffix: Suffix | None = None
    reuse: Reuse | None = None
    """What was taken over from a prefix."""
    attention_state: AttentionState | None = None
    """What the attention method keeps; None where every call attends to everything."""


class Tracker:
    """One optional mechanism of a masked request: made only where the request asks for it, kept in `state.trackers`.

    The loop calls those that there are, in their order, at the points below; here, nothing happens at any of them. R
    are the running rows, W the positions of the window.
    """

    per_row: ClassVar[Mapping[str, Any]] = {}
    """What it keeps for each row, by name: values [B, ...], or something with `paradec.core.rows.Rows`. Of those with a
    column for every position, what fills them up; None of the others."""
    fixed: ClassVar[str | None] = None
    """Why rows of a state that has it cannot leave, and others take their place; None where they can."""
    host_only: ClassVar[str | None] = None
    """Why the device step cannot serve it, with what it names of `state` in braces; None where it can."""

    def attach(self, state: MaskedState) -> None:
        """Show what it keeps in the state, where others read it, under the same names."""
        vars(state).update(vars(self))

    def opened(self, state: MaskedState, rows: np.ndarray) -> None:
        """`rows` [N], which run, have opened a block."""

    def reads_window(self, state: MaskedState) -> bool:
        """Whether this step needs the logits of decided positions as well."""
        return False

    def proposed(self, state: MaskedState, proposal: MaskedProposal) -> None:
        """Complete a proposal before anybody sees it. The state does not change."""

    def decided(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        """Complete what the method has decided, before it is written. The state does not change."""

    def writes(self, state: MaskedState, tokens: Tensor) -> None:
        """The window is about to hold `tokens` [R, W]."""

    def written(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        """The window holds what was decided."""

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        """A step was written, and is about to be counted. found: what the commit has read from the device."""

    def closing(self, state: MaskedState, proposal: MaskedProposal, tokens: np.ndarray, ends: Ends) -> bool:
        """A step was counted, and full blocks are about to close. Returns whether any block ends elsewhere than before.

        Args:
            tokens: [R, W], what the window holds.
        """
        return False

    def taken(self, rows: np.ndarray, columns: int | None) -> Self:
        """The same for the `rows` [N] alone, with so many columns (see `paradec.core.rows.Rows`)."""
        other = copy.copy(self)
        for name, fill in self.per_row.items():
            value = of_rows.kept(getattr(self, name), rows, columns)
            setattr(other, name, value if columns is None or fill is None else of_rows.fitted(value, columns, fill))
        return other

    def put(self, slots: np.ndarray, other: Self) -> None:
        """Replace the rows `slots` [N] by all rows of another one."""
        for name, fill in self.per_row.items():
            own, new = getattr(self, name), getattr(other, name)
            of_rows.exchange(own, slots, new if fill is None else of_rows.fitted(new, own.shape[1], fill))

    def release(self) -> None:
        """Give back memory when the request ends."""
