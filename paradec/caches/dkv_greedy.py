"""dKV-Cache-Greedy: evaluate the positions decided in this step and the last, and a few masks nearby. Ma et al.,
"dKV-Cache: The Cache for Diffusion Language Models", arXiv 2505.15781, section 3.3, and its repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.stored import SubsetCache
from paradec.core.checks import check_int


@dataclass(frozen=True)
class DkvGreedy(SubsetCache):
    """Evaluate the positions that this step decides, masks near them, and the positions that the last step decided.
    Whole rows are evaluated at a block's first step, and then every `refresh_interval` steps.

    The sampler must choose positions before the forward (`random` does). Each position that this step decides adds the
    `window` nearest masks that are not yet chosen, the left one first at equal distance. This follows the public code;
    the paper's text places the window around the last step's positions.

    Args:
        refresh_interval: steps of a block between whole evaluations; in the paper, more than 2 reduces quality.
        window: masks near each position (the paper goes up to 6).
    """

    refresh_interval: int = 2
    window: int = 4

    name = "dkv_greedy"
    paper = "dKV-Cache"
    arxiv = "2505.15781"
    summary = "evaluates the positions decided in this step and the last, and a few masks nearby"
    facts = CacheFacts(predictions=("same",), evaluates="picks", stateless=False)
    exact_when = "refresh_interval=1, or the model has one layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("refresh_interval", self.refresh_interval, low=1)
        check_int("window", self.window, low=0)

    def exact_for(self, topology: str) -> bool:
        return super().exact_for(topology) or self.refresh_interval == 1

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.block_step[rows] % self.refresh_interval == 0

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        assert picks is not None, "facts.evaluates requests the sampler's preview"
        log = state.cache_state
        column = np.arange(state.canvas.shape[1])
        undecided = log.undecided(rows) & (column < state.length[rows, None])
        needed = ~undecided & (log.changed_at[rows] == state.row_step[rows, None] - 1)
        row, pick_index = (picks >= 0).nonzero()
        needed[row, picks[row, pick_index]] = True
        for pick in picks.T:  # [R]: one position of each row, -1 for none
            masks = undecided & ~needed & (pick >= 0)[:, None]
            # rank by distance d: 2d - 1 on the left, 2d on the right
            rank = 2 * np.abs(column - pick[:, None]) - (column < pick[:, None])
            order = np.argsort(np.where(masks, rank, np.iinfo(np.int64).max), axis=1, kind="stable")[:, : self.window]
            np.put_along_axis(needed, order, np.take_along_axis(masks | needed, order, 1), 1)
        return needed
