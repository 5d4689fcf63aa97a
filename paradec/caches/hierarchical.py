"""Hierarchical cache: finished blocks for good, and a dual cache of smaller blocks in the open one. Wu et al.,
"Fast-dLLM v2", arXiv 2509.26328, section 3.3, and its generation code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.block import BlockCache


@dataclass(frozen=True)
class HierarchicalCache(BlockCache):
    """As `block`, but with request blocks smaller than the model's (`block_length=8` of 32), only the step that opens
    one evaluates the model's block; the others evaluate the small block. Exact across model blocks, approximate inside.
    Shifted models also evaluate the position left of the small block; the public code repeats whole blocks until the
    small block's first token is decided."""

    name = "hierarchical"
    paper = "Fast-dLLM v2"
    arxiv = "2509.26328"
    summary = "as block, with a dual cache of the request's smaller blocks inside"
    facts = CacheFacts(topologies=("block_causal",))
    exact_when = "the request's blocks are the model's, or the model has one layer"

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = super().range(state, rows)
        is_opening = state.block_step[rows] == 0
        # beside the first small block is the prompt's end, if it shares the model's block
        left = is_opening | (state.block_start[rows] == state.prompt_length[rows])
        return np.where(left, start, state.block_start[rows]), np.where(is_opening, stop, state.block_end[rows])
