"""dKV-Cache-Decode: a position's keys and values are cached one step after its token is decided. Ma et al.,
"dKV-Cache: The Cache for Diffusion Language Models", arXiv 2505.15781, section 3.2, and its repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.stored import SubsetCache
from paradec.core.checks import check_choice, check_int

SHIFT_TYPES = ("un_right", "un", "right")


@dataclass(frozen=True)
class DkvDecode(SubsetCache):
    """Evaluate all undecided positions, in later blocks too, and positions decided in the last step; cache the rest.

    Keys and values change most when a mask becomes a token, so they are computed once more before they are cached: the
    one-step delay. Every `refresh_interval` steps the whole row is evaluated. As in the public codes, models that
    predict in place count steps per block; a block's first two steps evaluate the whole row. Shifted models count steps
    per row, and cache a position

    - "un_right": when it and its right neighbour are decided (Table 4: 77.71 on GSM8K);
    - "un": when its right neighbour is decided (76.34; used in the paper's runs);
    - "right": when it is decided (32.68). Masks may then get no logits; if all in the block do, the row is evaluated.

    Args:
        refresh_interval: steps between whole evaluations; None is 8 for models that predict in place, 4 for shifted
            ones.
        shift_type: for shifted models.
    """

    refresh_interval: int | None = None
    shift_type: str = "un_right"

    name = "dkv_decode"
    paper = "dKV-Cache"
    arxiv = "2505.15781"
    summary = "caches decided tokens one step late; evaluates all undecided positions"
    facts = CacheFacts(evaluates="undecided", stateless=False)
    exact_when = "refresh_interval=1, or the model has one layer and shift_type is 'un_right'"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("refresh_interval", self.refresh_interval, low=1, none=True)
        check_choice("shift_type", self.shift_type, SHIFT_TYPES)

    def exact_for(self, topology: str) -> bool:
        return super().exact_for(topology) or self.refresh_interval == 1

    def interval(self, state: Any) -> int:
        return self.refresh_interval or (4 if state.facts.shift else 8)

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        if state.facts.shift:
            is_due = state.row_step[rows] % self.interval(state) == 0
            return is_due if self.shift_type != "right" else is_due | ~self._any_logits(state, rows)
        step = state.block_step[rows]
        return (step <= 1) | (step % self.interval(state) == 0)

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        return ~self.cached_positions(state, rows)

    def cached_positions(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """Find the positions whose stored keys and values are used: [N, L] bool."""
        is_stable = self.is_stable(state, rows)
        if not state.facts.shift:
            return is_stable
        is_right_stable = np.ones_like(is_stable)
        is_right_stable[:, :-1] = is_stable[:, 1:]
        index, last = np.arange(len(rows)), state.length[rows] - 1
        # a row's last position predicts nothing; the public code caches it with its left neighbour, or always
        is_right_stable[index, last] = is_stable[index, last - 1]
        is_pair_stable = is_stable & is_right_stable
        if self.shift_type == "un_right":
            return is_pair_stable
        is_right_stable[index, last] = True
        is_cached = is_right_stable if self.shift_type == "un" else is_stable
        # in a row's second step only the prompt is cached yet
        return np.where(state.row_step[rows, None] <= 1, is_pair_stable, is_cached)

    def is_stable(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """Find the positions that were evaluated after they were decided: [N, L] bool."""
        return state.cache_state.is_stable(state, rows, delay=1)

    def _any_logits(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """Whether any undecided token of the open block would get logits, from the position on its left: [R] bool."""
        column = np.arange(state.canvas.shape[1])
        block = (column >= state.block_start[rows, None]) & (column < state.block_end[rows, None])
        undecided = block & state.cache_state.undecided(rows)
        evaluated = ~self.cached_positions(state, rows)
        return (undecided[:, 1:] & evaluated[:, :-1]).any(1) | (undecided[:, 0] & evaluated[:, 0])
