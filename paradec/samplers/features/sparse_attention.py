"""Sparse attention of a request (`paradec.attention`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.samplers.features.feature import Ends, Feature


@dataclass
class SparseAttention(Feature):
    """Tells the attention method which calls were made for a step that counts."""

    attention_state: Any
    """What the method keeps of a request, with `plan`, `committed`, `report` and `release`."""

    why_rows_stay = "sparse attention keeps a pattern of all rows"
    host_only = "sparse attention keeps its pattern on the host"

    def on_query(self, state: Any, part: Any, query: Any) -> None:
        query.attention = self.attention_state.plan(state, part)

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        self.attention_state.committed(state, proposal.cost.queries)
        return False
