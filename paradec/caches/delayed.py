"""Delayed block cache: a full block is kept once it has waited for some steps, in which whole rows are evaluated.

"d3LLM", arXiv 2601.07568, and its generation code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import outward
from paradec.caches.stored import RangeCache
from paradec.core.checks import check_choice, check_int


@dataclass(frozen=True)
class DelayedCache(RangeCache):
    """Evaluate a row from the end of the kept blocks to its own end. A full block with nothing undecided left of it
    waits `cache_delay_iter` steps, and whole rows are evaluated while it waits; the step after that evaluates it for
    the last time. The prompt waits as well: it is evaluated in the first `cache_delay_iter` steps.

    Made for several open blocks (`paradec.PipelinedBlocks`), because the tokens of a block that has just been
    filled still change its neighbours' keys and values. Works with all block policies.

    Args:
        cache_delay_iter: steps that a full block waits, at least 1; the published scripts have 1 and 2.
        refresh_interval: also evaluate whole rows every so many steps of a row, unless a block is kept in that step;
            10000, the code's default, means never.
        waiting: which full blocks wait. "all": each block from when it is full, so that several are kept in one step,
            as in the code for Dream. "first": the first block that is not kept, and the next one from the step that
            keeps it, as in the code for LLaDA, which stops at the first block that waits. None is "first" for models
            that predict in place and "all" for shifted ones.

    Approximate for bidirectional models: kept keys and values do not depend on tokens that are decided later. The code
    for Dream stores, in a whole step, blocks that still wait and counts them as not stored, so that later calls attend
    to them twice; here a row has one stored length, as in the code for LLaDA. For models that predict shifted, the
    position left of the first undecided block is evaluated too; the public code uses the logits of the wrong position
    there.
    """

    cache_delay_iter: int = 1
    refresh_interval: int = 10000
    waiting: str | None = None

    name = "delayed"
    paper = "d3LLM"
    arxiv = "2601.07568"
    summary = "keeps full blocks after some whole steps; evaluates the rest of the row"
    facts = CacheFacts(exact_on=("block_causal",), steady=False)
    exact_when = "the model has one layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("cache_delay_iter", self.cache_delay_iter, low=1, high=2**10)
        check_int("refresh_interval", self.refresh_interval, low=1)
        if self.waiting is not None:
            check_choice("waiting", self.waiting, ("first", "all"))

    def begin(self, state: Any) -> np.ndarray:
        """[B, 1 + delay] int64: how much is kept; then where what was waiting ended before the last step, the one
        before that, ..."""
        return np.tile(state.prompt_length[:, None], (1, 1 + self.cache_delay_iter))

    def committed(self, state: Any, tokens: np.ndarray) -> None:
        rows, kept = state.window.rows, state.cache_state
        kept[rows, 0] = np.maximum(kept[rows, 0], np.where(self.refreshes(state, rows), 0, kept[rows, -1]))
        waits = self._waits(state, rows)
        kept[rows, 2:] = kept[rows, 1:-1]
        kept[rows, 1] = waits

    def _waits(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[R] int64: where what waits since this step or an earlier one ends; nothing does where that is kept."""
        full = state.block_start[rows]
        if (self.waiting or ("all" if state.facts.shift else "first")) == "all":
            return full
        end, before = state.cache_state[rows, 0], state.cache_state[rows, 1]
        block = np.minimum(state.blocks.open(end, state.prompt_length[rows], state.length[rows]), full)
        # the prompt waits before all blocks
        block = np.where(state.row_step[rows] + 1 < self.cache_delay_iter, end, block)
        return np.where(before > end, before, block)

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        steps, kept = state.row_step[rows], state.cache_state[rows]
        keeps = kept[:, -1] > kept[:, 0]  # a block has waited long enough
        waits = state.block_start[rows] > kept[:, -1]
        due = (steps + 1) % self.refresh_interval == 0
        return (steps < self.cache_delay_iter) | ~keeps & (waits | due)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return outward(state, rows, state.cache_state[rows, 0], state.length[rows])
