"""Block policies and stop rules, and the opening and closing of a masked state's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from paradec.core.blocks import BlockPolicy
from paradec.core.checks import LARGEST_INT, check_choice, check_int
from paradec.core.rows import ROWS
from paradec.samplers.masked.state import MaskedState

LONGEST_BLOCK = LARGEST_INT
NEVER = np.iinfo(np.int64).max
"""End of a row that no stop rule ends."""


@dataclass(frozen=True)
class FixedBlocks(BlockPolicy):
    """Blocks of one length, decoded left to right (LLaDA, arXiv 2502.09992, "semi-autoregressive remasking").

    Args:
        length: positions per block, at least 1; the last block of a row may be shorter.
        align: "prompt" counts blocks from the end of the prompt (LLaDA), "absolute" from position 0 (SDAR, LLaDA2).
    """

    length: int
    align: str = "prompt"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_choice("align", self.align, ("prompt", "absolute"))

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        if self.align == "absolute":
            return np.minimum((start // self.length + 1) * self.length, length)
        return np.minimum(start + self.length, length)

    def count(self, prompt_length: int, length: int) -> int:
        first = prompt_length // self.length * self.length if self.align == "absolute" else prompt_length
        return -(-(length - first) // self.length)


@dataclass(frozen=True)
class WholeCanvas(BlockPolicy):
    """One block of all positions after the prompt (Dream)."""

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return length.copy()

    def count(self, prompt_length: int, length: int) -> int:
        return 1


class StopRule(Protocol):
    """Rule that ends rows. An instance serves one request and may have state."""

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        """Find the ends of the running rows: [R] int64, the position after a row's last token, or `NEVER` if the row
        continues; None if all rows continue. All positions before an end must be decided, and the end must be after the
        row's first answer token. state: the `MaskedState` after the step's tokens were written. tokens: [R, W] int64 on
        the host, the window's tokens."""
        ...


@dataclass(eq=False)
class EndOfText:
    """Stop rule: end a row after its first end token, once all positions before it are decided. mask: the mask id."""

    ids: Sequence[int]
    mask: int
    first: np.ndarray = field(metadata=ROWS)
    """[B] int64: first position at which an end token counts."""

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        is_end = tokens == self.ids[0]
        for end in self.ids[1:]:  # np.isin takes ten times as long for two ids
            is_end |= tokens == end
        if not is_end.any():
            return None
        window = state.window
        if window.host_valid is not None:
            is_end &= window.host_valid
        is_end &= window.host_positions >= self.first[window.rows, None]
        column = (is_end | (tokens == self.mask)).argmax(1)  # the first end token or mask
        stops = is_end[np.arange(len(column)), column]
        return np.where(stops, state.block_start[window.rows] + column + 1, NEVER) if stops.any() else None


def find_ends(rules: Sequence[StopRule], state: Any, tokens: np.ndarray) -> np.ndarray | None:
    """Find the earliest end of each running row by any rule, in the format of a `StopRule`."""
    ends = None
    for rule in rules:
        ends_of_rule = rule(state, tokens)
        if ends_of_rule is not None:
            ends = ends_of_rule if ends is None else np.minimum(ends, ends_of_rule)
    return ends


def open_blocks(state: MaskedState, rows: np.ndarray) -> None:
    """Move `rows` to their next block with undecided positions. Rows without such a block are finished."""
    opening_rows = rows
    while len(rows):
        state.block_start[rows] = state.block_end[rows]
        rows = rows[state.block_start[rows] < state.length[rows]]
        if not len(rows):
            break
        start = state.block_start[rows]
        state.block_end[rows] = state.blocks.open(start, state.prompt_length[rows], state.length[rows])
        masks = state.masks_before[rows, state.block_end[rows]] - state.masks_before[rows, start]
        state.masks_at_open[rows] = state.remaining[rows] = masks
        state.block_step[rows] = 0
        if state.memory.specs:
            state.memory.reset(rows, "block")
        rows = rows[masks == 0]
    state.running &= state.block_start < state.length
    for feature in state.features.values():
        feature.on_start(state, opening_rows[state.running[opening_rows]])
    state.make_window()


def close_blocks(
    state: MaskedState, rows: np.ndarray, ends: np.ndarray | None, hold: np.ndarray | None = None, changed: bool = False
) -> None:
    """Finish rows at their `ends` [R] (from `find_ends`), and move rows with a full block to the next block.
    hold: [R] bool, rows whose full block stays open. changed: True makes new windows even if no row moves."""
    full = state.remaining[rows] == 0
    if hold is not None:
        full &= ~hold
    if ends is None and not changed and not full.any():
        return
    if ends is not None:
        stopped = ends < NEVER
        full &= ~stopped
        last_end = state.length.copy()
        last_end[rows[stopped]] = ends[stopped]
        state.end = np.minimum(state.end, last_end)
        state.stopped[rows[stopped]] = ends[stopped] <= state.requested_end[rows[stopped]]
        _fill_tails(state, last_end)
        state.finish(rows[stopped])
    open_blocks(state, rows[full])


def trim_rows(state: MaskedState, cut: np.ndarray, tokens: np.ndarray) -> None:
    """Shorten the running rows to at most `cut` [R] positions; the window does not move. tokens: [R, W], its tokens."""
    window = state.window
    is_shorter = cut < state.length[window.rows]
    rows, cut = window.rows[is_shorter], cut[is_shorter]
    state.length[rows], state.has_equal_lengths = cut, False
    state.end[rows] = np.minimum(state.end[rows], cut)
    state.block_end[rows] = np.minimum(state.block_end[rows], cut)
    undecided = tokens[is_shorter] == state.mask_id
    undecided &= window.host_positions[is_shorter] < state.block_end[rows, None]
    if window.host_valid is not None:
        undecided &= window.host_valid[is_shorter]
    state.remaining[rows] = undecided.sum(1)
    if state.store is not None:
        for branch in range(state.branches):
            state.store.clear_from(rows + branch * state.batch, cut)
    _fill_tails(state, state.length)


def _fill_tails(state: MaskedState, ends: np.ndarray) -> None:
    column = torch.arange(state.canvas.shape[1], device=state.canvas.device)
    tail = column >= torch.as_tensor(ends, device=column.device).unsqueeze(1)
    state.canvas.masked_fill_(tail, state.facts.fill_token_id)
