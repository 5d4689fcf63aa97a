"""ReCAP's cache: full steps evaluate and store whole rows, local steps evaluate only the positions that their group of
steps decides (targets). ReCAP, arXiv 2505.19089, and its public code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts, Part
from paradec.caches.parts import full_parts, subset_parts
from paradec.caches.stored import StoredCache
from paradec.core.checks import check_bool


@dataclass(frozen=True)
class RecapCache(StoredCache):
    """Evaluate whole rows when `recap` opens a group of steps, and only the group's targets in local steps.

    Args:
        recompute_prompt: whether local steps evaluate the prompt too, as the public code does with its class token;
            use False for a long text prompt.
    """

    recompute_prompt: bool = True

    name = "recap"
    paper = "ReCAP"
    arxiv = "2505.19089"
    summary = "evaluates the positions that a group of steps decides, over keys and values from its first step"
    facts = CacheFacts(topologies=("bidirectional",), predictions=("same",), evaluates="targets", stateless=False)
    exact_when = "the model has one layer, or every step is a full one"
    gathers_positions = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("recompute_prompt", self.recompute_prompt)

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        assert picks is not None  # requested by `facts.evaluates`
        is_full = (picks < 0).all(1)
        full_index, local_index = np.flatnonzero(is_full), np.flatnonzero(~is_full)
        limit = 1 if len(local_index) else 3  # at most three calls in all
        parts = full_parts(state, full_index, limit, self.shape_multiple) if len(full_index) else []
        if not len(local_index):
            return parts
        rows, column = state.window.rows[local_index], np.arange(state.canvas.shape[1])
        needed = np.zeros((len(local_index), len(column)), bool)
        row, pick_index = (picks[local_index] >= 0).nonzero()
        needed[row, picks[local_index][row, pick_index]] = True
        if self.recompute_prompt:
            needed |= column < state.prompt_length[rows, None]
        return parts + subset_parts(state, local_index, needed, 2 if len(full_index) else 3, self.shape_multiple)
