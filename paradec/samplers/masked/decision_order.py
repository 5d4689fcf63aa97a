"""When each position took its token, for models whose answers depend on it (`Model.reads_order`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.core.query import WindowQuery
from paradec.core.rows import row_layout
from paradec.samplers.masked.queries import tokens_of
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker


@dataclass
class DecisionOrder(Tracker):
    """The row's step after which each position took its token, -1 where it was given or is undecided."""

    decided_at: Tensor = field(metadata=row_layout(columns=1, fill=-1))

    def asks(self, state: MaskedState, part: Part, query: WindowQuery, now: dict[str, Any]) -> None:
        rows = torch.as_tensor(query.rows, device=self.decided_at.device)
        now["decided_at"] = tokens_of(self.decided_at, query, rows).repeat(state.branches, 1)

    def writes(self, state: MaskedState, tokens: Tensor) -> None:
        before, step = state.window.read(state.canvas), torch.as_tensor(state.row_step[state.window.rows, None])
        when = torch.where(tokens == state.mask_id, -1, step.to(tokens.device))
        when = torch.where(tokens == before, state.window.read(self.decided_at), when)
        state.window.write(self.decided_at, when)
