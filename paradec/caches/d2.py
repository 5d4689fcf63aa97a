"""d2Cache: each step renews the masks that are likely to be decided next, and the tokens that were decided last.

Jiang et al., "d2Cache: Accelerating Diffusion-Based LLMs via Dual Adaptive Caching", arXiv 2509.23094, and its public
code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paradec.caches.base import CacheFacts
from paradec.caches.stored import ChangeLog, SubsetCache
from paradec.core.checks import check_int, check_number
from paradec.core.rows import row_layout

UNREAD = 1.0
"""Used as the confidence of masks that no step has read: density alone ranks them."""


@dataclass(frozen=True)
class D2Cache(SubsetCache):
    """Evaluate `current_k` masks, the positions that the last step decided, and small gaps between them; keep the rest.
    Only a row's first step evaluates the whole row.

    The masks are those with the highest confidence times certainty density: the share of near positions that are
    decided (a Gaussian kernel; everything left of a row counts as decided, and everything right of it if its last
    position is). Candidates are the masks from the open block to the end of the block with the `current_k`-th mask;
    those of the open block come first. Only what is evaluated can be decided. Models that predict shifted have the
    position left of each of these masks evaluated in its place, since its logits are there.

    Three things differ from the public code, two of them errors of that code. It never renews the confidences of its
    first step; here they are those of the last step that read the mask, and if none has, density alone decides (masks
    after the open block have no logits here). Its loop cuts the block in place to what is undecided, so that the cache
    takes the block to be shorter and ignores masks at the end of a half-filled block, however dense; here blocks keep
    their length. And its third part is left out: positions that a rollout of attention finds important. On two small
    models masks and new tokens sufficed, and the rollout needs an attention that returns its weights.

    Args:
        current_k: masks that a step evaluates, at least 1.
        sigma: of the density's kernel, in positions, at most 100.
        inflate_w: positions between two evaluated ones that are at most this far apart are evaluated too; 0 leaves
            gaps.
    """

    current_k: int = 32
    sigma: float = 10.0
    inflate_w: int = 4

    name = "d2"
    paper = "d2Cache"
    arxiv = "2509.23094"
    summary = "evaluates the masks that may be decided next, and what was decided last"
    facts = CacheFacts(
        topologies=("bidirectional",), evaluates="some", steady=False, suffixes=True, needs_confidence=True
    )
    exact_when = "the model has one layer, predicts in place, and current_k covers the masks"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("current_k", self.current_k, low=1)
        check_number("sigma", self.sigma, low=0, high=100, open_low=True)
        check_int("inflate_w", self.inflate_w, low=0)

    def begin(self, state: Any) -> ReadLog:
        return ReadLog(state)

    def observe_confidence(self, state: Any, confidence: np.ndarray, available: np.ndarray) -> None:
        state.cache_state.read(state, confidence, available)

    def committed(self, state: Any, tokens: np.ndarray) -> None:
        super().committed(state, tokens)
        if state.present is not None:
            state.cache_state.stored[state.window.rows] = state.present[state.window.rows]

    def refreshes(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.row_step[rows] == 0

    def needed(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        log, shift = state.cache_state, state.facts.shift
        masks = self.masks(state, rows)
        if shift:  # the first position of all has its own logits
            masks[:, 0] |= masks[:, 1]
            masks[:, 1:-1], masks[:, -1] = masks[:, 2:].copy(), False
        new = log.changed_at[rows] == state.row_step[rows, None] - 1
        # what is after a row is no edge of a gap
        needed = masks | (new & (np.arange(new.shape[1]) < state.length[rows, None]))
        if state.present is not None:  # what exists since this block has opened has no keys yet
            needed |= state.present[rows] & ~log.stored[rows]
        return between(needed, self.inflate_w)

    def masks(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[N, L] bool: the masks that this step may decide or renews."""
        log, column = state.cache_state, np.arange(state.canvas.shape[1])
        start, end = state.block_start[rows, None], state.block_end[rows, None]
        inside = column < state.length[rows, None]
        undecided = log.undecided(rows) & inside
        if state.present is not None:
            undecided &= state.present[rows]
        ahead = undecided & (column >= start)
        enough = ahead.cumsum(1) >= self.current_k
        last = np.where(enough.any(1), enough.argmax(1), state.length[rows] - 1)[:, None]
        ahead &= column < self.stop(state, rows, last)
        decided = ~undecided
        decided = np.where(inside, decided, decided[np.arange(len(rows)), state.length[rows] - 1, None])
        scores = self.confidence(state, rows) * density(decided, self.sigma)
        scores += 2.0 * (column < end)  # above all others
        scores = np.where(ahead, scores, -np.inf)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.current_k]
        chosen = np.zeros_like(ahead)
        np.put_along_axis(chosen, best, True, axis=1)
        return chosen & ahead

    def stop(self, state: Any, rows: np.ndarray, last: np.ndarray) -> np.ndarray:
        """[N, 1] int64: where the block ends that has the position `last` [N, 1], all blocks being as long as the open
        one."""
        start, end = state.block_start[rows, None], state.block_end[rows, None]
        return start + ((last - start) // (end - start) + 1) * (end - start)

    def confidence(self, state: Any, rows: np.ndarray) -> np.ndarray:
        """[N, L] float64: what masks are ranked by, beside the density."""
        return state.cache_state.confidence[rows]


def density(decided: np.ndarray, sigma: float) -> np.ndarray:
    """[N, L] float64 in [0, 1]: how much of what is near each position has been decided. decided: [N, L] bool."""
    radius = math.ceil(6 * sigma)
    kernel = np.exp(-(np.arange(-radius, radius + 1) ** 2) / (2 * sigma**2))
    left, right = np.ones((len(decided), radius)), np.repeat(decided[:, -1:], radius, 1)
    wide = np.concatenate((left, decided, right), 1)
    near = np.lib.stride_tricks.sliding_window_view(wide, 2 * radius + 1, axis=1)
    return near @ (kernel / kernel.sum())


def between(chosen: np.ndarray, most: int) -> np.ndarray:
    """`chosen` [N, L] bool, with what is between two chosen positions that are at most `most` apart."""
    if most < 2:
        return chosen
    size = chosen.shape[1]
    column = np.arange(size)
    before = np.maximum.accumulate(np.where(chosen, column, -size - most), axis=1)
    after = np.minimum.accumulate(np.where(chosen, column, 2 * size + most)[:, ::-1], axis=1)[:, ::-1]
    return chosen | (after - before <= most)


@dataclass(init=False, eq=False)
class ReadLog(ChangeLog):
    """Besides, how confident the model was of each mask when it was last read, and what has keys and values."""

    confidence: np.ndarray = field(metadata=row_layout(columns=1, fill=UNREAD))
    """[B, L] float64."""
    stored: np.ndarray = field(metadata=row_layout(columns=1))
    """[B, L] bool: what existed at the last step."""

    def __init__(self, state: Any):
        super().__init__(state)
        self.confidence = np.full(self.canvas.shape, UNREAD)
        self.stored = np.zeros(self.canvas.shape, bool)

    def read(self, state: Any, confidence: np.ndarray, available: np.ndarray) -> None:
        """The window's candidates had `confidence` [R, W], where they were `available` [R, W]."""
        at = state.window.rows[:, None], state.window.host_positions
        self.confidence[at] = np.where(available, confidence, self.confidence[at])
