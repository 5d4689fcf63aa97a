"""Prefix cache: what lies left of the open block is kept from the block's first forward.

Wu et al., "Fast-dLLM", arXiv 2505.22618, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import Cache, Part, spans
from paradec.caches.none import whole_rows


@dataclass(frozen=True)
class PrefixCache(Cache):
    """A block's first forward evaluates the whole row (and serves the block's first step); the others evaluate the
    block and everything right of it over the keys and values of what lies left.

    Approximate for bidirectional models: the prefix was encoded before the block was filled. Exact when every block
    takes one step. For models that predict shifted, the position left of the block is evaluated too, so that the
    block's first token has its own logits; the reference commits that token from the full forward instead, unasked.
    """

    name = "prefix"
    paper = "Fast-dLLM"
    arxiv = "2505.22618"
    summary = "keeps what lies left of the open block; evaluates the block and all after it"

    def plan(self, state: Any) -> list[Part]:
        rows = state.window.rows
        opened = state.block_step[rows] == 0
        parts = whole_rows(state, np.flatnonzero(opened), most=2) if opened.any() else []
        inside = np.flatnonzero(~opened)
        if len(inside):
            start = np.maximum(state.block_start[rows[inside]] - state.facts.shift, 0)
            parts += spans(state, inside, start, self.end(state, rows[inside]), "window", most=2)
        return parts

    def end(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[N] int64: where the evaluated range ends."""
        return state.length[rows]
