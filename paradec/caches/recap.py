"""ReCAP's cache: a full evaluation keeps every key and value, a local one evaluates the group's targets over them.

ReCAP, arXiv 2505.19089, and its public code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts, Part
from paradec.caches.parts import subsets, whole_rows
from paradec.caches.stored import StoredCache
from paradec.core.checks import check_bool


@dataclass(frozen=True)
class RecapCache(StoredCache):
    """Evaluate whole rows where the sampler `recap` opens a group; in its local steps evaluate the group's targets,
    decided or not, with the stored keys and values of all other positions.

    Args:
        recompute_prompt: whether local steps evaluate the prompt too (its class token is evaluated again in the public
            code); False reads it from the store. Choose False for a long text prompt.
    """

    recompute_prompt: bool = True

    name = "recap"
    paper = "ReCAP"
    arxiv = "2505.19089"
    summary = "evaluates the positions that a group of steps will decide, over what its first step kept"
    facts = CacheFacts(topologies=("bidirectional",), predictions=("same",), evaluates="targets", steady=False)
    exact_when = "the model has one layer, or every step is a full one"
    costly_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("recompute_prompt", self.recompute_prompt)

    def plan(self, state: Any, picks: np.ndarray | None = None) -> list[Part]:
        assert picks is not None  # what `facts.evaluates` asks for
        full = (picks < 0).all(1)
        whole, rest = np.flatnonzero(full), np.flatnonzero(~full)
        parts = whole_rows(state, whole, 1 if len(rest) else 3, self.shape_multiple) if len(whole) else []
        if not len(rest):
            return parts
        rows, column = state.window.rows[rest], np.arange(state.canvas.shape[1])
        needed = np.zeros((len(rest), len(column)), bool)
        row, at = (picks[rest] >= 0).nonzero()
        needed[row, picks[rest][row, at]] = True
        if self.recompute_prompt:
            needed |= column < state.prompt_length[rows, None]
        return parts + subsets(state, rest, needed, 2 if len(whole) else 3, self.shape_multiple)
