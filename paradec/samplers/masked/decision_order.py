"""When each position took its token, for models whose answers depend on it (`Model.reads_order`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paradec.core import rows as of_rows
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker


class DecisionOrder(Tracker):
    """The row's step after which each position took its token, -1 where it was given or is undecided."""

    def __init__(self, decided_at: Tensor):
        self.decided_at = decided_at
        """[B, L] int64."""

    def attach(self, state: MaskedState) -> None:
        state.decided_at = self.decided_at

    def writes(self, state: MaskedState, tokens: Tensor) -> None:
        before, step = state.window.read(state.canvas), torch.as_tensor(state.row_step[state.window.rows, None])
        when = torch.where(tokens == state.mask_id, -1, step.to(tokens.device))
        when = torch.where(tokens == before, state.window.read(self.decided_at), when)
        state.window.write(self.decided_at, when)

    def taken(self, rows: np.ndarray, columns: int | None) -> DecisionOrder:
        decided_at = of_rows.taken(self.decided_at, rows)
        return DecisionOrder(decided_at if columns is None else of_rows.fitted(decided_at, columns, -1))

    def put(self, slots: np.ndarray, other: DecisionOrder) -> None:
        of_rows.put(self.decided_at, slots, of_rows.fitted(other.decided_at, self.decided_at.shape[1], -1))
