"""d2Cache: each step evaluates masks that are likely to be decided next, and the last decided tokens. Jiang et al.,
"d2Cache: Accelerating Diffusion-Based LLMs via Dual Adaptive Caching", arXiv 2509.23094, and its code."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.stored import ChangeLog, SubsetCache
from paradec.core.checks import check_int, check_number
from paradec.core.rows import row_layout

UNEVALUATED_CONFIDENCE = 1.0
"""Confidence of masks that were never evaluated, so that density alone ranks them."""


@dataclass(frozen=True)
class D2Cache(SubsetCache):
    """Evaluate `current_k` masks, the positions that the last step decided, and small gaps between them. Only a row's
    first step evaluates the whole row.

    Masks are ranked by confidence times certainty density, the decided share of nearby positions under a Gaussian
    kernel. Positions before a row count as decided; positions after the row count like its last position. Candidates
    are the masks from the open block to the end of the block with the `current_k`-th mask; masks of the open block rank
    first. Only evaluated masks can be decided. On shifted models the position left of each mask is evaluated instead.

    Differences from the public code: a mask has the confidence of the last step that evaluated it; in that code, of the
    first such step. Blocks here have a fixed length; the code cuts them to undecided positions and misses masks at
    their end. The code also evaluates positions chosen by attention rollout, which two small models did not need.

    Args:
        current_k: masks per step, at least 1.
        sigma: standard deviation of the kernel, in positions, at most 100.
        inflate_w: fill gaps between evaluated positions that are at most this far apart.
    """

    current_k: int = 32
    sigma: float = 10.0
    inflate_w: int = 4

    name = "d2"
    paper = "d2Cache"
    arxiv = "2509.23094"
    summary = "evaluates the masks that may be decided next, and the positions decided last"
    facts = CacheFacts(
        topologies=("bidirectional",), evaluates="some", stateless=False, supports_suffix=True, needs_confidence=True
    )
    exact_when = "the model has one layer, predicts in place, and current_k covers the masks"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("current_k", self.current_k, low=1)
        check_number("sigma", self.sigma, low=0, high=100, open_low=True)
        check_int("inflate_w", self.inflate_w, low=0)

    def begin(self, state: Any) -> ConfidenceLog:
        return ConfidenceLog(state)

    def observe_confidence(self, state: Any, confidence: np.ndarray, available: np.ndarray) -> None:
        index, last_confidence = (state.window.rows[:, None], state.window.host_positions), state.cache_state.confidence
        last_confidence[index] = np.where(available, confidence, last_confidence[index])

    def on_commit(self, state: Any, tokens: np.ndarray) -> None:
        super().on_commit(state, tokens)
        if state.present is not None:
            state.cache_state.stored[state.window.rows] = state.present[state.window.rows]

    def needs_refresh(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.row_step[rows] == 0

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        log, shift = state.cache_state, state.facts.shift
        masks = self.choose_masks(state, rows)
        if shift:  # position 0 predicts its own token, too
            masks[:, 0] |= masks[:, 1]
            masks[:, 1:-1], masks[:, -1] = masks[:, 2:].copy(), False
        is_new = log.changed_at[rows] == state.row_step[rows, None] - 1
        # columns after a row's end must not bound a gap
        needed = masks | (is_new & (np.arange(is_new.shape[1]) < state.length[rows, None]))
        if state.present is not None:  # positions that appeared when the block opened have no stored keys
            needed |= state.present[rows] & ~log.stored[rows]
        return fill_gaps(needed, self.inflate_w)

    def choose_masks(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """Choose the masks that this step evaluates and may decide: [N, L] bool."""
        log, column = state.cache_state, np.arange(state.canvas.shape[1])
        start, end = state.block_start[rows, None], state.block_end[rows, None]
        is_inside = column < state.length[rows, None]
        undecided = log.undecided(rows) & is_inside
        if state.present is not None:
            undecided &= state.present[rows]
        is_candidate = undecided & (column >= start)
        is_enough = is_candidate.cumsum(1) >= self.current_k
        last = np.where(is_enough.any(1), is_enough.argmax(1), state.length[rows] - 1)[:, None]
        is_candidate &= column < self.block_ends(state, rows, last)
        decided = ~undecided
        decided = np.where(is_inside, decided, decided[np.arange(len(rows)), state.length[rows] - 1, None])
        scores = self.confidence(state, rows) * decided_density(decided, self.sigma)
        scores += 2.0 * (column < end)  # masks of the open block rank above all others
        scores = np.where(is_candidate, scores, -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.current_k]
        is_best = np.zeros_like(is_candidate)
        np.put_along_axis(is_best, best, True, axis=1)
        return is_best & is_candidate

    def block_ends(self, state: Any, rows: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Find the end of the block with position `last` [N, 1], for blocks as long as the open block: [N, 1] int64."""
        start, end = state.block_start[rows, None], state.block_end[rows, None]
        return start + ((last - start) // (end - start) + 1) * (end - start)

    def confidence(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[N, L] float64: confidence of masks."""
        return state.cache_state.confidence[rows]


def decided_density(decided: np.ndarray, sigma: float) -> np.ndarray:
    """Compute the weighted share of `decided` [N, L] bool positions near each position: [N, L] float64 in [0, 1]."""
    radius = math.ceil(6 * sigma)
    kernel = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    left, right = np.ones((len(decided), radius)), np.repeat(decided[:, -1:], radius, 1)
    padded = np.concatenate((left, decided, right), 1)
    weighted = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1, axis=1)
    return weighted @ (kernel / kernel.sum())


def fill_gaps(chosen: np.ndarray, max_gap: int) -> np.ndarray:
    """Extend `chosen` [N, L] bool by all positions between chosen ones at a distance of at most `max_gap`."""
    if max_gap < 2:
        return chosen
    size = chosen.shape[1]
    column = np.arange(size)
    previous = np.maximum.accumulate(np.where(chosen, column, -size - max_gap), axis=1)
    following = np.minimum.accumulate(np.where(chosen, column, 2 * size + max_gap)[:, ::-1], axis=1)[:, ::-1]
    return chosen | (following - previous <= max_gap)


@dataclass(init=False, eq=False)
class ConfidenceLog(ChangeLog):
    """Change log with the confidence of each mask when it was last evaluated, and the positions with stored keys."""

    confidence: np.ndarray = field(metadata=row_layout(columns=1, fill=UNEVALUATED_CONFIDENCE))
    stored: np.ndarray = field(metadata=row_layout(columns=1))
    """[B, L] bool: positions that were present at the last step."""

    def __init__(self, state: Any):
        super().__init__(state)
        self.confidence = np.full(self.canvas.shape, UNEVALUATED_CONFIDENCE)
        self.stored = np.zeros(self.canvas.shape, bool)
