"""Attention that leaves something out (`paradec.attention`): what it keeps of a masked request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Part
from paradec.core.contract import AttentionState
from paradec.core.query import WindowQuery
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker
from paradec.samplers.masked.views import MaskedProposal


@dataclass
class SparseAttention(Tracker):
    """Tells the attention method which calls were made for a step that counts."""

    attention_state: AttentionState

    fixed = "sparse attention keeps a pattern of all rows"
    host_only = "sparse attention keeps its pattern on the host"

    def asks(self, state: MaskedState, part: Part, query: WindowQuery, now: dict[str, Any]) -> None:
        now["attention"] = self.attention_state.plan(state, part)

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        self.attention_state.committed(state, proposal.cost.queries)
