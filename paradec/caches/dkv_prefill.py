"""dKV-Cache-Prefill: the prompt is evaluated once.

Ma et al., "dKV-Cache: The Cache for Diffusion Language Models", arXiv 2505.15781, section 3.3, and its code for Dream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import outward
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class DkvPrefill(RangeCache):
    """A row's first step evaluates the whole row; the others evaluate all but the prompt, which is never renewed.

    For models that predict shifted, the prompt's last position holds the answer's first logits and is evaluated too.
    """

    name = "dkv_prefill"
    paper = "dKV-Cache"
    arxiv = "2505.15781"
    summary = "keeps the prompt from the first step on; evaluates the whole answer"
    facts = CacheFacts(exact_on=("block_causal",))
    exact_when = "the model has one layer"

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.row_step[rows] == 0

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return outward(state, rows, state.prompt_length[rows] - state.facts.shift, state.length[rows])
