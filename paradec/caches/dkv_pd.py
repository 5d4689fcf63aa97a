"""dKV-Cache-PD: caches the prompt at once, and decided tokens one step late (arXiv 2505.15781, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.dkv_decode import DkvDecode


@dataclass(frozen=True)
class DkvPD(DkvDecode):
    """`dkv_prefill` for the prompt and `dkv_decode` for the answer. Only a row's first step evaluates the prompt; every
    `refresh_interval` steps of the row (None: 4) the whole answer is evaluated."""

    name = "dkv_pd"
    summary = "caches the prompt at its first step, and decided tokens one step late"
    exact_when = "the model has one layer and shift_type is 'un_right'"

    def exact_for(self, topology: str) -> bool:
        return topology in self.facts.exact_on

    def interval(self, state: Any) -> int:
        return self.refresh_interval or 4

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.row_step[rows] == 0

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        is_due = state.row_step[rows] % self.interval(state) == 0
        if state.facts.shift and self.shift_type == "right":
            is_due |= ~self._any_logits(state, rows)
        is_answer = np.arange(state.canvas.shape[1]) >= state.prompt_length[rows, None] - state.facts.shift
        return is_answer & (is_due[:, None] | ~self.cached_positions(state, rows))
