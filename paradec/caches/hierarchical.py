"""Hierarchical cache: exact keys and values of finished blocks, and a dual cache of smaller blocks in the open block.
Wu et al., "Fast-dLLM v2", arXiv 2509.26328, section 3.3, and its generation code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.block import BlockCache


@dataclass(frozen=True)
class HierarchicalCache(BlockCache):
    """As `block`, for requests with smaller blocks than the model's (`block_length=8` instead of 32). Only the step
    that opens a small block evaluates the model's block; later steps evaluate the small block. Exact between the
    model's blocks, approximate inside them. Shifted models also evaluate the position left of the small block; the
    public code instead repeats the model's block until the small block's first token is decided."""

    name = "hierarchical"
    paper = "Fast-dLLM v2"
    arxiv = "2509.26328"
    summary = "as block, with a dual cache for smaller blocks inside the model's block"
    facts = CacheFacts(topologies=("block_causal",))
    exact_when = "the request's blocks are the model's, or the model has one layer"

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = super().range(state, rows)
        is_opening = state.block_step[rows] == 0
        # the prompt may end in the first small block's model block: evaluate that part, too
        needs_start = is_opening | (state.block_start[rows] == state.prompt_length[rows])
        return np.where(needs_start, start, state.block_start[rows]), np.where(is_opening, stop, state.block_end[rows])
