"""Changes of decided tokens by methods that revise (`Needs.revises`), and the closing of such methods' blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.masked.blocks import LONGEST_BLOCK
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import MaskedProposal, StepDecision, View


@dataclass
class Revision:
    """Changes of decided tokens in one step; None for no change. Shapes: `R` rows, `W` positions."""

    remask: Tensor | None = None
    """[R, W] bool: editable positions that become undecided again."""
    edit: Tensor | None = None
    """[R, W] bool: editable positions that get this step's candidate token."""
    text: Tensor | None = None
    """[R, W] int64: all tokens after the step, for methods with `Needs.moves`; prompt positions are unchanged."""
    hold_block: Tensor | None = None
    """[R] bool: rows whose full block stays open for another step."""


def editable_positions(state: MaskedState, proposal: MaskedProposal) -> Tensor:
    """Find the positions that the method has decided in the open block: [R, W] bool."""
    window = state.window
    editable = (proposal.current != state.mask_id) & ~window.read(state.is_prompt)
    if proposal.block_end is not None:
        editable = editable & (window.positions < proposal.block_end.unsqueeze(1))
    return editable if window.valid is None else editable & window.valid


def revise_decision(sampler: Any, state: MaskedState, view: View, selected: Tensor) -> StepDecision:
    """Combine the selection [R, W] bool with the method's revision. A row takes nothing back if its remaining steps
    could not fill the block afterwards."""
    revision = sampler.revise(view, selected)
    if revision.text is not None:  # changes all positions of the block except the prompt's
        text = revision.text
        written = (view.candidates | view.editable) & (text != view.current)
        filled = (view.current == state.mask_id).long() - (text == state.mask_id).long()
        return StepDecision(text, written, filled.masked_fill(~written, 0), revision.hold_block)
    values, written, filled = view.tokens, selected, selected.long()
    if revision.edit is not None:
        written = written | revision.edit & view.editable
    if revision.remask is not None:
        remask = revision.remask & view.editable
        least = torch.as_tensor(min_filled(sampler, state, state.window.rows), device=remask.device)
        remask = remask & (filled.sum(1) - remask.sum(1) >= least).unsqueeze(1)
        values = values.masked_fill(remask, state.mask_id)
        written, filled = written | remask, filled - remask.long()
    return StepDecision(values, written, filled, revision.hold_block)


def max_block_steps(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """Return the step limit of the rows' open blocks: [R] int64. With `Needs.moves`, all positions count as masks."""
    masks = state.masks_at_open[rows]
    if sampler.needs.moves:  # these methods need blocks of one length
        masks = np.full_like(masks, state.blocks.length)  # type: ignore[attr-defined]
    return np.asarray(sampler.max_steps(masks))


def min_filled(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """Return how many more masks this step must at least fill than it takes back, so that one mask in each later step
    fills the block: [R] int64, may be negative. With `Needs.moves`, only the last step must fill masks."""
    steps_left: np.ndarray = max_block_steps(sampler, state, rows) - state.block_step[rows] - 1
    if sampler.needs.moves:
        return np.where(steps_left > 0, -LONGEST_BLOCK, state.remaining[rows])
    return state.remaining[rows] - steps_left


def stable_tokens(
    sampler: Any, state: MaskedState, rows: np.ndarray, arrays: Mapping[str, np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return which rows hold their full block open ([R] bool; None: no row), and the window's tokens [R, W] for stop
    rules: in blocks that stay open, masks replace this step's tokens (`ends_with_block`: all). arrays: of `to_host`."""
    holds_block = arrays.get("hold_block")
    closes = state.remaining[rows] <= 0
    if holds_block is not None:
        holds_block = holds_block & (state.block_step[rows] < max_block_steps(sampler, state, rows))
        closes = closes & ~holds_block
    may_change = ~closes[:, None] if sampler.needs.ends_with_block else arrays["selected"] & ~closes[:, None]
    return holds_block, np.where(may_change, state.mask_id, arrays["tokens"])
