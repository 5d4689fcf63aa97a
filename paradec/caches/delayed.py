"""Delayed block cache: a full block is cached after some more steps, which evaluate whole rows. "d3LLM", arXiv
2601.07568, and its generation code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.parts import widen_to_blocks
from paradec.caches.stored import RangeCache
from paradec.core.checks import check_choice, check_int


@dataclass(frozen=True)
class DelayedCache(RangeCache):
    """Evaluate a row from the end of its cached blocks to the row's end. A full block without undecided positions on
    its left waits `cache_delay_iter` steps, in which whole rows are evaluated; the next step evaluates the block a last
    time. The prompt waits too, from the first step.

    The delay is meant for several open blocks (`paradec.PipelinedBlocks`): tokens of the later blocks change keys and
    values of a full block. All block policies work. Approximate on bidirectional models: cached keys ignore new tokens.
    Differences from the public codes: the code for Dream stores waiting blocks in whole steps, counts them as not
    stored and attends to them twice. Here a row has one stored length, as in the code for LLaDA. On shifted models the
    position left of the first undecided block is evaluated too; the code for Dream reads the wrong logits there.

    Args:
        cache_delay_iter: steps that a full block waits, at least 1; the published scripts use 1 and 2.
        refresh_interval: n; every n-th step of a row evaluates the whole row, unless a block becomes cached in this
            step. The code's 10000 in effect means never.
        waiting: "all": each block waits from the step that fills it (the code for Dream). "first": one block waits at a
            time; the next begins to wait when this block is cached (the code for LLaDA). None: "first" for models that
            predict in place, "all" for shifted models.
    """

    cache_delay_iter: int = 1
    refresh_interval: int = 10000
    waiting: str | None = None

    name = "delayed"
    paper = "d3LLM"
    arxiv = "2601.07568"
    summary = "caches full blocks after some whole steps; evaluates everything after them"
    facts = CacheFacts(exact_on=("block_causal",), stateless=False)
    exact_when = "the model has one layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("cache_delay_iter", self.cache_delay_iter, low=1, high=2**10)
        check_int("refresh_interval", self.refresh_interval, low=1)
        if self.waiting is not None:
            check_choice("waiting", self.waiting, ("first", "all"))

    def begin(self, state: Any) -> np.ndarray:
        """[B, 1 + delay] int64: end of the cached blocks; then ends of the waiting blocks, latest step first."""
        return np.tile(state.prompt_length[:, None], (1, 1 + self.cache_delay_iter))

    def on_commit(self, state: Any, tokens: np.ndarray) -> None:
        rows, block_ends = state.window.rows, state.cache_state
        cached_ends = np.where(self.needs_refresh(state, rows), 0, block_ends[rows, -1])
        block_ends[rows, 0] = np.maximum(block_ends[rows, 0], cached_ends)
        waiting_ends = self._waiting_ends(state, rows)
        block_ends[rows, 2:] = block_ends[rows, 1:-1]
        block_ends[rows, 1] = waiting_ends

    def _waiting_ends(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """Find the end of the waiting blocks, or of the cached blocks if none waits: [R] int64."""
        full_end = state.block_start[rows]
        if (self.waiting or ("all" if state.facts.shift else "first")) == "all":
            return full_end
        end, earlier_ends = state.cache_state[rows, 0], state.cache_state[rows, 1]
        block_end = np.minimum(state.blocks.open(end, state.prompt_length[rows], state.length[rows]), full_end)
        # blocks wait only after the prompt has waited
        block_end = np.where(state.row_step[rows] + 1 < self.cache_delay_iter, end, block_end)
        return np.where(earlier_ends > end, earlier_ends, block_end)

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        steps, block_ends = state.row_step[rows], state.cache_state[rows]
        caches_block = block_ends[:, -1] > block_ends[:, 0]  # a block has waited long enough
        has_waiting = state.block_start[rows] > block_ends[:, -1]
        is_due = (steps + 1) % self.refresh_interval == 0
        return (steps < self.cache_delay_iter) | ~caches_block & (has_waiting | is_due)

    def range(self, state: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return widen_to_blocks(state, rows, state.cache_state[rows, 0], state.length[rows])
