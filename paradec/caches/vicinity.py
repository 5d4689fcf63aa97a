"""Vicinity refresh: each step evaluates the open block and some positions around it. Ma et al., "dInfer",
arXiv 2510.08666 (vicinity KV-cache refresh), and python/dinfer/decoding of its repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import widen_to_blocks
from paradec.caches.stored import RangeCache
from paradec.core.checks import check_int


@dataclass(frozen=True)
class VicinityCache(RangeCache):
    """Evaluate [block start - prefix_look, block end + after_look). A row's first steps, and the step that opens a
    block, evaluate the whole row.

    A whole-row step commits tokens from its own logits. dInfer's code also runs a partial forward in that step, and
    commits from the logits of both forwards.

    Args:
        prefix_look, after_look: positions left and right of the block, at least 0.
        warmup_steps: a row's first `warmup_steps + 1` steps evaluate the whole row; at least 0.
        cache_update_freq: n; every n-th step of a block evaluates the whole row, too. None turns this off.
    """

    prefix_look: int = 16
    after_look: int = 16
    warmup_steps: int = 4
    cache_update_freq: int | None = None

    name = "vicinity"
    paper = "dInfer"
    arxiv = "2510.08666"
    summary = "as dual, but also evaluates some positions around the block; begins with a few whole steps"
    facts = CacheFacts(exact_on=("block_causal",), stateless=False, supports_suffix=True)
    exact_when = "cache_update_freq=1, prefix_look and after_look cover the row, or the model has one layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefix_look", "after_look", "warmup_steps"):
            check_int(name, getattr(self, name), low=0)
        check_int("cache_update_freq", self.cache_update_freq, low=1, none=True)

    def exact_for(self, topology: str) -> bool:
        return super().exact_for(topology) or self.cache_update_freq == 1

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        interval = self.cache_update_freq
        is_due = (state.row_step[rows] <= self.warmup_steps) | (state.block_step[rows] == 0)
        return is_due if interval is None else is_due | (state.block_step[rows] % interval == 0)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return widen_to_blocks(
            state, rows, state.block_start[rows] - self.prefix_look, state.block_end[rows] + self.after_look
        )
