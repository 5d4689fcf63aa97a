"""Record of the step that decided each position, for models that read this order (`Model.reads_order`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.rows import row_layout
from paradec.samplers.features.feature import Ends, Feature


@dataclass
class DecisionOrder(Feature):
    """Order in which the positions of each row were decided."""

    decided_at: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: the row's step that wrote each token; -1 at prompt tokens and undecided positions."""

    def on_query(self, state: Any, part: Any, query: Any) -> None:
        rows = self.decided_at.index_select(0, torch.as_tensor(query.rows, device=self.decided_at.device))
        positions = query.positions[: len(query.rows)]
        decided_at = rows.narrow(1, 0, positions.shape[1]) if query.kind == "full" else rows.gather(1, positions)
        query.decided_at = decided_at.repeat(state.branches, 1)

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        step = decision.steps
        if step is None:
            step = torch.as_tensor(state.row_step[proposal.rows, None] - 1, device=self.decided_at.device)
        window, current = state.window, torch.as_tensor(tokens, device=self.decided_at.device)
        new_steps = torch.where(current == state.mask_id, -1, step)
        window.write(self.decided_at, torch.where(current == proposal.current, window.read(self.decided_at), new_steps))
        return False
