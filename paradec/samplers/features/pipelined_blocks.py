"""Several open blocks in one window (`paradec.PipelinedBlocks`): their progress, and the moves of the window.

A row's window extends from the start of its first block with undecided positions to the end of the last added block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number, short_repr
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.masked.blocks import LONGEST_BLOCK, NEVER, EndOfText, FixedBlocks


@dataclass(frozen=True)
class PipelinedBlocks(FixedBlocks):
    """Fixed blocks, of which several are open at once: the next block is added before the last one is full.

    "D2F", arXiv 2508.09192; "d3LLM", arXiv 2601.07568, and the public code of both. A step may commit undecided
    positions of all open blocks. After a step the next block is added if at least a share `add` of the last block's
    positions is decided, but no block is added after an end token. The sampler's rule selects among all open blocks. If
    it must commit a token, it commits the best token of each block that `forced` names.

    These blocks work with samplers that need no schedule over steps and take no tokens back, on all models, with the
    usual block caches and with `delayed`, the cache made for them. `PipelinedBlocks(n, add=1, full=1)` is
    `FixedBlocks(n)`.

    Args:
        length: positions per block, as for `FixedBlocks`.
        align: "model" counts blocks as the model does: from position 0 for block-causal models, else from the end of
            the prompt. "prompt" and "absolute" are as for `FixedBlocks`.
        add: share of the last open block's positions that must be decided for the next block, in [0, 1]. The published
            scripts have 0.1 (d3LLM) and 0.1 to 0.7 (D2F); their code's default is 0.5.
        full: share of a block's positions that must be decided for the next block to be fully active, in [0, 1]; the
            first open block is always fully active. 0.95 in the published scripts. No effect with `forced="first"`.
        forced: blocks that commit at least one token in every step. "first": only the first block that is not full
            (d3LLM). "active": every fully active block that is not full (D2F). Other blocks commit only tokens that
            the rule selects.

    Prompt tokens between the masks of a block count neither as decided nor as undecided. d3LLM's code for LLaDA also
    commits the most confident position of all open blocks at any score; this is not implemented.
    """

    align: str = "model"
    add: float = 0.1
    full: float = 0.95
    forced: str = "first"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_choice("align", self.align, ("model", "prompt", "absolute"))
        check_number("add", self.add, low=0, high=1)
        check_number("full", self.full, low=0, high=1)
        check_choice("forced", self.forced, ("first", "active"))

    def for_model(self, model: Any) -> PipelinedBlocks:
        """Return the policy, with `align="model"` replaced by the model's alignment of blocks."""
        align = model.facts.block_align if model.facts.topology == "block_causal" else "prompt"
        return replace(self, align=align) if self.align == "model" else self


@dataclass
class OpenBlocks(Feature):
    """Moves of the window of `PipelinedBlocks`."""

    why_host_only = "blocks={state.blocks} open several blocks of a row at once"

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """Move the windows: remove full blocks at the front, and add the next block if enough of the last block is
        decided. Windows of rows that end do not move."""
        if proposal.early is not None:
            return False
        window = state.window
        policy: Any = state.blocks
        rows, positions = window.rows, window.host_positions
        end = state.block_end[rows]
        undecided = (tokens == state.facts.mask_id) & (positions < end[:, None])
        if window.host_valid is not None:
            undecided &= window.host_valid
        is_fixed = ~undecided.any(1)  # `close_blocks` opens the next block after a full window
        if ends is not None:
            is_fixed |= ends < NEVER
        start, prompt_length = state.block_start[rows], state.prompt_length[rows]
        first_undecided = positions[np.arange(len(rows)), undecided.argmax(1)]
        origin = np.zeros_like(prompt_length) if policy.align == "absolute" else prompt_length
        new_start = np.maximum((first_undecided - origin) // policy.length * policy.length + origin, start)
        offset = np.where(is_fixed, 0, new_start - start)
        # the last open block: start, initial masks, remaining masks
        last_start = np.maximum((end - 1 - origin) // policy.length * policy.length + origin, prompt_length)
        total = state.masks_before[rows, end] - state.masks_before[rows, last_start]
        num_undecided = (undecided & (positions >= last_start[:, None])).sum(1)
        is_filled = total - num_undecided >= policy.add * total
        adds_block = ~is_fixed & is_filled & (end < state.length[rows]) & ~_has_ended(state, tokens)
        is_moved = (offset > 0) | adds_block
        if not is_moved.any():
            return False
        state.memory.shift("window", rows[offset > 0], offset[offset > 0])
        state.block_start[rows] += offset
        state.block_step[rows[offset > 0]] = 0
        index = rows[adds_block]
        while len(index):  # skip blocks without masks
            old_end = state.block_end[index]
            state.block_end[index] = policy.open(old_end, state.prompt_length[index], state.length[index])
            masks = state.masks_before[index, state.block_end[index]] - state.masks_before[index, old_end]
            state.remaining[index] += masks
            index = index[(masks == 0) & (state.block_end[index] < state.length[index])]
        num_masks = state.masks_before[rows, state.block_end[rows]] - state.masks_before[rows, state.block_start[rows]]
        state.masks_at_open[rows] = np.where(is_moved, num_masks, state.masks_at_open[rows])
        for feature in state.features.values():
            feature.on_start(state, rows[adds_block])
        return True


def check_pipelined(sampler: Any, policy: PipelinedBlocks, steps: int | None = None) -> None:
    """Raise ValueError if a sampler, or the `steps` of a request, do not work with several open blocks."""
    why = None
    if sampler.needs.revises:
        why = "it takes tokens back, which needs a single open block"
    elif sampler.needs.extra_quantities or sampler.needs.mask_probes:
        why = "it evaluates one block at a time"
    elif sampler.uses_steps and not sampler.needs.least_by_steps:
        why = "its schedule is for one block at a time"
    if why is not None:
        raise ValueError(
            f"sampler {sampler.name!r} does not work with blocks={short_repr(policy)}: {why}; use paradec.FixedBlocks, "
            "or a rule without a schedule, e.g. sampler='threshold'"
        )
    if sampler.uses_steps and steps is not None:
        raise ValueError(f"steps={steps} does not work with blocks={short_repr(policy)}: leave steps out")


def block_numbers(policy: PipelinedBlocks, positions: Any, block_start: Any, prompt_length: Any) -> Any:
    """Number the blocks of positions: [R, W] int64, from 0 for the block that contains `block_start` [R, 1]."""
    origin = 0 if policy.align == "absolute" else prompt_length
    return (positions - origin) // policy.length - (block_start - origin) // policy.length


def open_starts(state: Any, row: int, start: int, end: int) -> list[int]:
    """List the starts of the open blocks in a row whose window is [start, end)."""
    origin = 0 if state.blocks.align == "absolute" else int(state.prompt_length[row])
    length = state.blocks.length
    return [start, *range(start + length - (start - origin) % length, end, length)]


def leading_blocks(state: Any, current: Tensor) -> Tensor:
    """Number each position's block, [R, W] int64; -1 if the block need not commit a token. current: [R, W] tokens."""
    blocks, totals = _block_indices(state)
    undecided = (current == state.mask_id) & (blocks >= 0)
    if state.blocks.forced == "first":
        # the window's first block may be full already
        first = torch.where(undecided, blocks, blocks.shape[1]).amin(1, keepdim=True)
        return torch.where(blocks == first, blocks, -1)
    num_undecided = torch.zeros_like(totals).scatter_add_(1, blocks.clamp(min=0), undecided.long())
    # a block without masks counts as decided
    fraction = (totals - num_undecided) / totals.clamp(min=1) + (totals == 0)
    active = torch.ones_like(num_undecided, dtype=torch.bool)
    active[:, 1:] = fraction[:, :-1] >= state.blocks.full
    return torch.where((blocks >= 0) & active.gather(1, blocks.clamp(min=0)), blocks, -1)


def _block_indices(state: Any) -> tuple[Tensor, Tensor]:
    """Return each position's block [R, W] int64 (-1 outside of open blocks), and each block's initial masks [R, K]."""
    window, policy = state.window, state.blocks
    rows, positions = window.rows, window.host_positions
    start, end = state.block_start[rows, None], state.block_end[rows, None]
    blocks = block_numbers(policy, positions, start, state.prompt_length[rows, None])
    is_open = (positions >= start) & (positions < end)
    if window.host_valid is not None:
        is_open &= window.host_valid
    blocks = np.where(is_open, blocks, -1)
    totals = np.zeros((len(rows), int(blocks.max()) + 1), np.int64)
    row, column = is_open.nonzero()
    position = positions[row, column]
    masks = state.masks_before[rows[row], position + 1] - state.masks_before[rows[row], position]
    np.add.at(totals, (row, blocks[row, column]), masks)
    device = state.canvas.device
    return torch.as_tensor(blocks, device=device), torch.as_tensor(totals, device=device)


def best_of_blocks(scores: Tensor, leading: Tensor, candidates: Tensor) -> Tensor:
    """Select each block's best candidate, the leftmost on ties: [R, W] bool. leading: [R, W], from `leading_blocks`."""
    is_candidate = candidates & (leading >= 0)
    width = scores.shape[1]
    block = leading.clamp(min=0)
    block_scores = scores.masked_fill(~is_candidate, -torch.inf)
    highest = torch.full_like(block_scores, -torch.inf).scatter_reduce(1, block, block_scores, "amax")
    is_best = is_candidate & (block_scores == highest.gather(1, block))
    column = torch.arange(width, device=scores.device).expand_as(block)
    first = torch.full_like(block, width).scatter_reduce(1, block, torch.where(is_best, column, width), "amin")
    return is_best & (column == first.gather(1, block))


def ensure_progress(selected: Tensor, view: Any) -> Tensor:
    """Add the best candidate of each block that must commit a token but has none in the selection [R, W] bool."""
    leading = view.leading
    block = leading.clamp(min=0)
    is_selected = (selected & (leading >= 0)).long()
    has_selected = torch.zeros_like(block).scatter_add_(1, block, is_selected).gather(1, block) > 0
    return selected | best_of_blocks(view.scores, torch.where(has_selected, -1, leading), view.candidates)


def _has_ended(state: Any, tokens: np.ndarray) -> np.ndarray:
    """Find the rows whose window has an end token: [R] bool. tokens: [R, W]."""
    window = state.window
    rule = next((rule for rule in state.stop_rules if isinstance(rule, EndOfText)), None)
    if rule is None:
        return np.zeros(len(tokens), bool)
    is_end = np.isin(tokens, list(rule.ids)) & (window.host_positions >= state.answer_start[window.rows, None])
    if window.host_valid is not None:
        is_end &= window.host_valid
    return np.asarray(is_end.any(1))
