"""Block cache: everything left of the open block is final for block-causal models, and is evaluated once. From block
diffusion (Arriola et al., BD3-LM, arXiv 2503.09573), as in SDAR, LLaDA2 and Fast-dLLM v2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import widen_to_blocks
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class BlockCache(RangeCache):
    """A row's first step evaluates the prompt and the open block, later steps the block alone. Exact: no block sees a
    later one. A full block's final tokens are evaluated once more in the next block's first step, which sees them; the
    public codes use a separate forward. Blocks are the model's; a request's may be smaller. Over causal context a
    separate call stores them, since it also gives the next block's first token."""

    name = "block"
    paper = "BD3-LM"
    arxiv = "2503.09573"
    summary = "keeps finished blocks; evaluates the open block alone; exact"
    facts = CacheFacts(
        topologies=("block_causal", "causal_context"),
        exact_on=("block_causal", "causal_context"),
        reads_final_only=True,
    )

    def begin(self, state: Any) -> np.ndarray:
        """[B] int64: start of the last evaluated model block; everything left of it is final."""
        return np.zeros(state.batch, np.int64)

    def on_commit(self, state: Any, tokens: np.ndarray) -> None:
        rows = state.window.rows
        state.cache_state[rows] = widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])[0]

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), bool)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])
        if state.seeding is None:
            return np.minimum(start, state.cache_state[rows]), stop
        seeds = state.seeding[rows]  # the token before the block predicts its first one
        return np.minimum(start - seeds, state.cache_state[rows]), np.where(seeds, start, stop)
