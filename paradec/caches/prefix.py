"""Prefix cache: a block's first forward caches everything left of the block. Wu et al., "Fast-dLLM", arXiv 2505.22618,
section 3.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import widen_to_blocks
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class PrefixCache(RangeCache):
    """Evaluate the whole row in a block's first forward; in later forwards, the block and everything after it.
    Approximate for bidirectional models: the cached prefix does not see the block's tokens. Tokens from a block's last
    step are stored in the next block's first forward. Shifted models also evaluate the position left of the block,
    which predicts the block's first token; the public code always takes it from the full forward. On
    block-causal models ranges are widened to the model's blocks."""

    name = "prefix"
    paper = "Fast-dLLM"
    arxiv = "2505.22618"
    summary = "caches everything left of the open block; evaluates the block and all after it"
    device_step = True
    facts = CacheFacts(exact_on=("block_causal",), supports_suffix=True)
    exact_when = "every block takes one step, or the model has one layer"

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.block_step[rows] == 0

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return widen_to_blocks(state, rows, state.block_start[rows], state.length[rows])
