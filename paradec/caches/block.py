"""Block cache: everything left of the open block is final for block-causal models, and is evaluated once.

The cache of block diffusion (Arriola et al., BD3-LM, arXiv 2503.09573) as SDAR, LLaDA2 and Fast-dLLM v2 use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import outward
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class BlockCache(RangeCache):
    """A row's first step evaluates the prompt and the open block, the others only the block. Nothing right of the block
    is evaluated. Exact: under block-causal attention no block sees a later one.

    When a block is full, its final tokens are evaluated in the next block's first step, beside that block, which sees
    them; the public codes take a separate forward for this. Blocks here are the model's; a request's may be smaller.
    Over causal context a call of its own stores them, because it also gives the first token of the next block.
    """

    name = "block"
    paper = "BD3-LM"
    arxiv = "2503.09573"
    summary = "keeps finished blocks; evaluates the open block alone; exact"
    facts = CacheFacts(
        topologies=("block_causal", "causal_context"), exact_on=("block_causal", "causal_context"), final_alone=True
    )

    def begin(self, state: Any) -> np.ndarray:
        """[B] int64: where the last step began to evaluate the model's block; everything left of it is final."""
        return np.zeros(state.batch, np.int64)

    def committed(self, state: Any, tokens: np.ndarray) -> None:
        rows = state.window.rows
        state.cache_state[rows] = outward(state, rows, state.block_start[rows], state.block_end[rows])[0]

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), bool)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = outward(state, rows, state.block_start[rows], state.block_end[rows])
        if state.seeding is None:
            return np.minimum(start, state.cache_state[rows]), stop
        seeds = state.seeding[rows]  # the token before the block predicts its first one
        return np.minimum(start - seeds, state.cache_state[rows]), np.where(seeds, start, stop)
