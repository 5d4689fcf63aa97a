"""Block cache for block-causal models: final blocks left of the open one are evaluated once. From block diffusion
(Arriola et al., BD3-LM, arXiv 2503.09573), as in SDAR, LLaDA2 and Fast-dLLM v2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import widen_to_blocks
from paradec.caches.stored import RangeCache


@dataclass(frozen=True)
class BlockCache(RangeCache):
    """Evaluate the prompt and the open block in a row's first step, and only the block in later steps. Exact, since no
    block sees a later block. The next block's first step evaluates the filled block once more, with its final tokens;
    the public codes use a separate forward. "Block" here is the model's; a request's blocks may be smaller. On
    "causal_context" models a separate call stores a full block and also predicts the next block's first token."""

    name = "block"
    paper = "BD3-LM"
    arxiv = "2503.09573"
    summary = "caches finished blocks; evaluates only the open block; exact"
    facts = CacheFacts(
        topologies=("block_causal", "causal_context"),
        exact_on=("block_causal", "causal_context"),
        reads_final_only=True,
    )

    def begin(self, state: Any) -> np.ndarray:
        """[B] int64: start of the last evaluated model block. All tokens before this position are final."""
        return np.zeros(state.batch, np.int64)

    def on_commit(self, state: Any, tokens: np.ndarray) -> None:
        rows = state.window.rows
        state.cache_state[rows] = widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])[0]

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), bool)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])
        if state.seeding is None:
            return np.minimum(start, state.cache_state[rows]), stop
        seeds = state.seeding[rows]  # the token before the block predicts the block's first token
        return np.minimum(start - seeds, state.cache_state[rows]), np.where(seeds, start, stop)
