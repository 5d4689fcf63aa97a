"""Dual cache: a block's first forward caches both sides of the block. Wu et al., "Fast-dLLM", arXiv 2505.22618, section
3.2 (DualCache)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.parts import widen_to_blocks
from paradec.caches.prefix import PrefixCache


@dataclass(frozen=True)
class DualCache(PrefixCache):
    """As `prefix`, but later steps of a block evaluate only the block, over cached keys and values of both sides.
    Approximate for bidirectional models. These steps are the cheapest of all caches that refresh once per block."""

    name = "dual"
    summary = "caches both sides of the open block; evaluates only the block"
    device_step = True

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])
