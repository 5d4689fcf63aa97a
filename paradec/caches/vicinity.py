"""Vicinity refresh: the open block and some positions around it are recomputed at every step.

Ma et al., "dInfer", arXiv 2510.08666 (vicinity KV-cache refresh), and python/dinfer/decoding of its repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import outward
from paradec.caches.stored import RangeCache
from paradec.core.checks import check_int


@dataclass(frozen=True)
class VicinityCache(RangeCache):
    """Evaluate [block start - prefix_look, block end + after_look) with the kept keys and values of the rest; whole
    rows in the first steps of a request and whenever a block opens.

    The reference runs a refresh and a partial forward in the same iteration and decodes from both; here a step with a
    refresh decodes from the refresh alone.

    Args:
        prefix_look, after_look: positions recomputed on either side of the block, at least 0.
        warmup_steps: a row's first steps evaluate it whole, and so does the one after them; at least 0.
        cache_update_freq: also refresh every so many steps of a block; None refreshes only when it opens.
    """

    prefix_look: int = 16
    after_look: int = 16
    warmup_steps: int = 4
    cache_update_freq: int | None = None

    name = "vicinity"
    paper = "dInfer"
    arxiv = "2510.08666"
    summary = "as dual, with some positions around the block evaluated too, after a few whole steps"
    facts = CacheFacts(exact_on=("block_causal",), steady=False, suffixes=True)
    exact_when = "cache_update_freq=1, the looks cover the row, or the model has one layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefix_look", "after_look", "warmup_steps"):
            check_int(name, getattr(self, name), low=0)
        check_int("cache_update_freq", self.cache_update_freq, low=1, none=True)

    def exact_for(self, topology: str) -> bool:
        return super().exact_for(topology) or self.cache_update_freq == 1

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        every = self.cache_update_freq
        due = (state.row_step[rows] <= self.warmup_steps) | (state.block_step[rows] == 0)
        return due if every is None else due | (state.block_step[rows] % every == 0)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return outward(state, rows, state.block_start[rows] - self.prefix_look, state.block_end[rows] + self.after_look)
