"""dKV-Cache-Decode: a position's keys and values are kept from the step after the one that decided it.

Ma et al., "dKV-Cache: The Cache for Diffusion Language Models", arXiv 2505.15781, section 3.2, and its repository.
"""

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
    """Evaluate all undecided positions, later blocks included, and those that the last step decided; keep the rest.

    A token's keys and values change most in the step in which it turns from mask to token, so they are computed once
    more, from the token, before they are kept: the one-step delay. Every `refresh_interval` steps the whole row is
    evaluated. For models that predict in place, steps are counted in the block, whose first two steps are whole; for
    models that predict shifted they are counted in the row. The public codes for LLaDA and for Dream do the same.

    Where logits are one position to the left, a position may be needed until its right neighbour is decided, too:

    - "un_right": keep a position when it and its right neighbour are decided (Table 4: 77.71 on GSM8K);
    - "un": when its right neighbour is (76.34; the paper's runs have this, since its batches need equal counts);
    - "right": when it is (32.68). Logits can be missing for undecided tokens then; a row that would have none is
      evaluated whole.

    Args:
        refresh_interval: steps between whole evaluations; None is 8 for models that predict in place and 4 for shifted
            ones. 1 evaluates everything at every step.
        shift_type: for models that predict shifted.
    """

    refresh_interval: int | None = None
    shift_type: str = "un_right"

    name = "dkv_decode"
    paper = "dKV-Cache"
    arxiv = "2505.15781"
    summary = "keeps decided tokens, one step late; evaluates all that is undecided"
    facts = CacheFacts(evaluates="undecided", steady=False)
    exact_when = "refresh_interval=1, or the model has one layer and shift_type is 'un_right'"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("refresh_interval", self.refresh_interval, low=1, none=True)
        check_choice("shift_type", self.shift_type, SHIFT_TYPES)

    def exact_for(self, topology: str) -> bool:
        return super().exact_for(topology) or self.refresh_interval == 1

    def interval(self, state: Any) -> int:
        return self.refresh_interval or (4 if state.facts.shift else 8)

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        if state.facts.shift:
            due = state.row_step[rows] % self.interval(state) == 0
            return due if self.shift_type != "right" else due | ~self._any_logits(state, rows)
        step = state.block_step[rows]
        return (step <= 1) | (step % self.interval(state) == 0)

    def needed(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        return ~self.kept(state, rows)

    def kept(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[N, L] bool: positions whose stored keys and values serve this step."""
        own = self.settled(state, rows)
        if not state.facts.shift:
            return own
        right = np.ones_like(own)
        right[:, :-1] = own[:, 1:]
        each, last = np.arange(len(rows)), state.length[rows] - 1
        # nothing is read off a row's last position; the public code keeps it with its left neighbour, or always
        right[each, last] = own[each, last - 1]
        both = own & right
        if self.shift_type == "un_right":
            return both
        right[each, last] = True
        # whatever the type, only the prompt is kept from a row's first step
        return np.where(state.row_step[rows, None] <= 1, both, right if self.shift_type == "un" else own)

    def settled(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[N, L] bool: what has been evaluated since it was decided."""
        return state.cache_state.settled(state, rows, delay=1)

    def _any_logits(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[R] bool: whether an undecided token of the open block would have its logits (which are to its left)."""
        column = np.arange(state.canvas.shape[1])
        block = (column >= state.block_start[rows, None]) & (column < state.block_end[rows, None])
        asked = block & state.cache_state.undecided(rows)
        evaluated = ~self.kept(state, rows)
        return (asked[:, 1:] & evaluated[:, :-1]).any(1) | (asked[:, 0] & evaluated[:, 0])
