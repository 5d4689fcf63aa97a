"""dKV-Cache-Prefill: the prompt is evaluated once (arXiv 2505.15781, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import widen_to_blocks
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class DkvPrefill(RangeCache):
    """Evaluate the whole row in a row's first step, and only the answer in later steps. Shifted models also evaluate
    the prompt's last position, which predicts the answer's first token."""

    name = "dkv_prefill"
    paper = "dKV-Cache"
    arxiv = "2505.15781"
    summary = "caches the prompt at the first step; evaluates the whole answer"
    facts = CacheFacts(exact_on=("block_causal",))
    exact_when = "the model has one layer"

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.row_step[rows] == 0

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return widen_to_blocks(state, rows, state.prompt_length[rows] - state.facts.shift, state.length[rows])
