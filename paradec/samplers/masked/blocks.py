"""Blocks of a request: which policy cuts them, how rows open and close them, and where stop rules end rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from paradec.core.blocks import (
    LONGEST_BLOCK,
    POLICIES,
    AdaptiveBlocks,
    BlockPolicy,
    FixedBlocks,
    PipelinedBlocks,
    WholeCanvas,
    count_blocks,
)
from paradec.core.checks import check_choice, check_int, shown
from paradec.core.rows import ROWS
from paradec.request import Request
from paradec.samplers.masked.state import MaskedState

NEVER = np.iinfo(np.int64).max
"""The end of a row that goes on."""


# ---- the policy ------------------------------------------------------------------------------------------------------


def choose_policy(
    sampler: Any, model: Any, blocks: str | BlockPolicy | None, block_length: int | None, holes: bool = False
) -> BlockPolicy:
    """Choose the policy that was asked for, else the sampler's, else the model's.

    Args:
        blocks: a policy, or a name (`paradec.core.blocks.POLICIES`), which goes with a `block_length`.
        holes: whether prompts have masks; a bidirectional model fills these as one block.

    Raises:
        ValueError: lengths or a policy that do not fit the sampler or the model.
    """
    facts, policy = model.facts, blocks
    if isinstance(policy, str):
        policy, block_length = _named_policy(sampler, model, policy, block_length)
    if policy is not None and block_length is not None:
        raise ValueError(f"blocks={policy!r} and block_length={block_length!r} both cut the sequence; give one of them")
    if block_length is not None:
        check_int("block_length", block_length, low=1, high=LONGEST_BLOCK)
    if policy is None and not isinstance(blocks, str):
        policy = sampler.blocks(block_length)
    if policy is None and block_length is not None:
        if facts.block_length is None:
            return FixedBlocks(block_length)
        if facts.block_length % block_length and block_length % facts.block_length:
            raise ValueError(
                f"block_length={block_length} does not fit {facts.name}, which was trained with blocks of "
                f"{facts.block_length}; give {facts.block_length}, or a divisor or a multiple of it"
            )
        return FixedBlocks(block_length, align=facts.block_align)
    if policy is not None:
        if isinstance(policy, type) or not (hasattr(policy, "open") and hasattr(policy, "count")):
            raise ValueError(f"blocks={shown(policy)} must be a block policy, e.g. paradec.FixedBlocks(32)")
        if getattr(policy, "reads_logits", False) and sampler.needs.multi_step:
            raise ValueError(
                f"sampler {sampler.name!r} does not work with blocks={shown(policy)}: it drafts steps ahead, before "
                "the logits that say where a block ends; use paradec.FixedBlocks"
            )
        return policy.for_model(model) if hasattr(policy, "for_model") else policy
    if facts.block_length is not None:
        return FixedBlocks(facts.block_length, align=facts.block_align)
    if model.default_block_length is not None and not holes:
        return FixedBlocks(model.default_block_length)
    return WholeCanvas()


def _named_policy(
    sampler: Any, model: Any, name: str, block_length: int | None
) -> tuple[BlockPolicy | None, int | None]:
    """The policy of that name, or None and the length of its blocks."""
    check_choice("blocks", name, POLICIES)
    check_int("block_length", block_length, low=1, high=LONGEST_BLOCK, none=True)
    if name == "fixed":
        return None, block_length or model.facts.block_length or model.default_block_length or 32
    if name == "adaptive":
        policy = sampler.blocks(block_length)
        if isinstance(policy, AdaptiveBlocks):
            return policy, None
        return AdaptiveBlocks() if block_length is None else AdaptiveBlocks(length=block_length), None
    if name == "pipelined":
        return PipelinedBlocks(block_length or model.facts.block_length or model.default_block_length or 32), None
    if block_length is not None:
        raise ValueError(f"block_length={block_length} has no meaning with blocks='whole'")
    return WholeCanvas(), None


def check_steps(
    request: Request, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray, alone: bool = True
) -> None:
    """Raise ValueError where `steps` cannot be spread evenly over the blocks.

    Args:
        alone: whether these are all rows; blocks that are uneven because prompts differ in length are allowed.
    """
    if request.steps is None:
        return
    counts = count_blocks(request.steps, policy, starts, lengths)
    count = int(counts.max())
    if request.steps % count and alone and (counts == count).all():
        raise ValueError(
            f"steps={request.steps} must be a multiple of the number of blocks ({count}): every block has as many"
        )
    if request.steps < count:
        raise ValueError(f"steps={request.steps} must be at least the number of blocks ({count})")


# ---- where rows end --------------------------------------------------------------------------------------------------


class StopRule(Protocol):
    """One reason to end a row. Made for one request, kept in its state; it may remember what it has read.

    A rule only speaks about text that follows everything the user gave: an end token inside a hole of an infill, with
    given text after it, ends nothing.
    """

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        """Say where the running rows end.

        Args:
            state: the `MaskedState` after the write.
            tokens: [R, W] int64 on the host, the window after the write.

        Returns:
            [R] int64: the position after a row's last token, `NEVER` where it goes on; None when all go on. Nothing
            may be undecided between the start of a row and its end.
        """
        ...


@dataclass(eq=False)
class EndOfText:
    """End a row at its first end token, once nothing before it is undecided.

    Args:
        ids: the end tokens.
        mask: the mask id.
        first: [B] int64: the position from which on an end token counts.
    """

    ids: Sequence[int]
    mask: int
    first: np.ndarray = field(metadata=ROWS)

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        is_end = tokens == self.ids[0]
        for end in self.ids[1:]:  # one or two; np.isin takes ten times as long
            is_end |= tokens == end
        if not is_end.any():
            return None
        window = state.window
        if window.host_valid is not None:
            is_end &= window.host_valid
        is_end &= window.host_positions >= self.first[window.rows, None]
        column = (is_end | (tokens == self.mask)).argmax(1)  # the first of either
        stops = is_end[np.arange(len(column)), column]
        return np.where(stops, state.block_start[window.rows] + column + 1, NEVER) if stops.any() else None


def find_ends(rules: Sequence[StopRule], state: Any, tokens: np.ndarray) -> np.ndarray | None:
    """Where the running rows end by the earliest of their rules: as a `StopRule` says it."""
    ends = None
    for rule in rules:
        ends_of_rule = rule(state, tokens)
        if ends_of_rule is not None:
            ends = ends_of_rule if ends is None else np.minimum(ends, ends_of_rule)
    return ends


# ---- opening and closing ---------------------------------------------------------------------------------------------


def open_blocks(state: MaskedState, rows: np.ndarray) -> None:
    """Move `rows` to their next block that has something undecided; rows without one are finished."""
    opened = rows
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
        feature.on_start(state, opened[state.running[opened]])
    state.make_window()


def cut_blocks(state: MaskedState, rows: np.ndarray, end: np.ndarray) -> None:
    """End the blocks of `rows` [R], which have just opened, at `end` [R].

    Raises:
        RuntimeError: an end after that of the block.
    """
    if (end > state.block_end[rows]).any():
        raise RuntimeError(f"blocks={state.blocks} cut a block that is longer than what it read")
    shorter = end < state.block_end[rows]
    rows, end = rows[shorter], end[shorter]
    state.block_end[rows] = end
    masks = state.masks_before[rows, end] - state.masks_before[rows, state.block_start[rows]]
    state.masks_at_open[rows] = state.remaining[rows] = masks


def close_blocks(
    state: MaskedState, rows: np.ndarray, ends: np.ndarray | None, held: np.ndarray | None = None, moved: bool = False
) -> None:
    """Finish the rows that stop rules end; open the block after a full one.

    Args:
        rows: [R], the running ones. ends: as a `StopRule` says them.
        held: [R] bool, rows that stay in a full block.
        moved: whether a block ends elsewhere than before this step.
    """
    full = state.remaining[rows] == 0
    if held is not None:
        full &= ~held
    if ends is None and not moved and not full.any():
        return
    if ends is not None:
        stopped = ends < NEVER
        full &= ~stopped
        last = state.length.copy()
        last[rows[stopped]] = ends[stopped]
        state.end = np.minimum(state.end, last)
        state.stopped[rows[stopped]] = ends[stopped] <= state.asked[rows[stopped]]
        _fill_tails(state, last)
        state.finish(rows[stopped])
    open_blocks(state, rows[full])


def trim_rows(state: MaskedState, cut: np.ndarray, tokens: np.ndarray) -> None:
    """Cut the running rows off at `cut` [R]; the window [R, W] holds `tokens`, and is to be made again."""
    window = state.window
    shorter = cut < state.length[window.rows]
    rows, cut = window.rows[shorter], cut[shorter]
    state.length[rows], state.level = cut, False
    state.end[rows] = np.minimum(state.end[rows], cut)
    state.block_end[rows] = np.minimum(state.block_end[rows], cut)
    left = tokens[shorter] == state.mask_id
    left &= window.host_positions[shorter] < state.block_end[rows, None]
    if window.host_valid is not None:
        left &= window.host_valid[shorter]
    state.remaining[rows] = left.sum(1)
    if state.store is not None:
        for branch in range(state.branches):
            state.store.forget(rows + branch * state.batch, cut)
    _fill_tails(state, state.length)


def _fill_tails(state: MaskedState, ends: np.ndarray) -> None:
    """Fill rows with padding from `ends` [B] on."""
    column = torch.arange(state.canvas.shape[1], device=state.canvas.device)
    tail = column >= torch.as_tensor(ends, device=column.device).unsqueeze(1)
    state.canvas.masked_fill_(tail, state.facts.fill_token_id)
