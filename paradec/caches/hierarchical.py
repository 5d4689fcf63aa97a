"""Hierarchical cache: finished blocks for good, and inside the open block a dual cache of smaller blocks.

Wu et al., "Fast-dLLM v2", arXiv 2509.26328, section 3.3, and its generation code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.block import BlockCache


@dataclass(frozen=True)
class HierarchicalCache(BlockCache):
    """As `block`, but when the request's blocks are smaller than the model's (8 in 32: `block_length=8`), only the
    step that opens one evaluates the model's whole block; the others evaluate the small block with what it kept.

    Approximate inside the model's block, exact across blocks. For models that predict shifted, the position left of the
    small block is evaluated too; the public code, which shifts inside what it evaluates, repeats whole blocks until the
    small block's first token is decided instead.
    """

    name = "hierarchical"
    paper = "Fast-dLLM v2"
    arxiv = "2509.26328"
    summary = "as block, with a dual cache of the request's smaller blocks inside"
    facts = CacheFacts(topologies=("block_causal",))
    exact_when = "the request's blocks are the model's, or the model has one layer"

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start, stop = super().range(state, rows)
        opened = state.block_step[rows] == 0
        # beside the first small block is the prompt's end, if it shares the model's block
        left = opened | (state.block_start[rows] == state.prompt_length[rows])
        return np.where(left, start, state.block_start[rows]), np.where(opened, stop, state.block_end[rows])
