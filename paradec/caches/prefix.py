"""Prefix cache: everything left of the open block is kept from the block's first forward.

Wu et al., "Fast-dLLM", arXiv 2505.22618, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import outward
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class PrefixCache(RangeCache):
    """A block's first forward evaluates the whole row, for the block's first step; the others evaluate the block and
    everything right of it, with the kept keys and values of everything left of it.

    Approximate for bidirectional models: the prefix was encoded before the block was filled. The last tokens of a
    block get their own keys and values in the next block's first forward. For models that predict shifted, the position
    left of the block is evaluated too, so that the block's first token has its own logits; the reference instead
    commits that token from the full forward, unconditionally. On block-causal models ranges are widened to the model's
    blocks.
    """

    name = "prefix"
    paper = "Fast-dLLM"
    arxiv = "2505.22618"
    summary = "keeps everything left of the open block; evaluates the block and all after it"
    device_step = True
    facts = CacheFacts(exact_on=("block_causal",), suffixes=True)
    exact_when = "every block takes one step, or the model has one layer"

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.block_step[rows] == 0

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return outward(state, rows, state.block_start[rows], state.length[rows])
