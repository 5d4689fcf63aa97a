"""Dual cache: both sides of the open block are kept from the block's first forward. Wu et al., "Fast-dLLM", arXiv
2505.22618, section 3.2 (DualCache)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.parts import widen_to_blocks
from paradec.caches.prefix import PrefixCache


@dataclass(frozen=True)
class DualCache(PrefixCache):
    """As `prefix`, but steps inside a block evaluate the block alone, with kept keys and values of both sides.
    Approximate for bidirectional models; the cheapest steps of the caches that refresh by block."""

    name = "dual"
    summary = "keeps both sides of the open block; evaluates the block alone"
    device_step = True

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return widen_to_blocks(state, rows, state.block_start[rows], state.block_end[rows])
