"""Methods that take back what they decided in the open block: what the base holds them to (`MaskedSampler.revise`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.blocks import LONGEST_BLOCK
from paradec.core.contract import CanvasState
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import Decision, MaskedProposal, Revision, View


def editable(state: CanvasState, proposal: MaskedProposal) -> Tensor:
    """[R, W] bool: decided by the method in the open block."""
    window = state.window
    found = (proposal.current != state.facts.mask_id) & ~window.read(state.given)
    if proposal.block_end is not None:
        found = found & (window.positions < proposal.block_end.unsqueeze(1))
    return found if window.valid is None else found & window.valid


def revised(sampler: Any, state: MaskedState, view: View, selected: Tensor) -> Decision:
    """The selection [R, W] bool with what the method takes back; no more than it has steps left to decide again."""
    revision = sampler.revise(view, selected)
    if revision.text is not None:
        return _moved(state, view, revision)
    values, written, filled = view.tokens, selected, selected.long()
    if revision.edit is not None:
        written = written | revision.edit & view.editable
    if revision.remask is not None:
        remask = revision.remask & view.editable
        left = torch.as_tensor(least(sampler, state, state.window.rows), device=remask.device)
        remask = remask & (filled.sum(1) - remask.sum(1) >= left).unsqueeze(1)
        values = values.masked_fill(remask, state.facts.mask_id)
        written, filled = written | remask, filled - remask.long()
    return Decision(values, written, filled, revision.hold_block)


def _moved(state: MaskedState, view: View, revision: Revision) -> Decision:
    """The decision where text moves: what changes at open positions is written."""
    assert revision.text is not None
    mask_id, text = state.facts.mask_id, revision.text
    written = (view.candidates | view.editable) & (text != view.current)
    filled = (view.current == mask_id).long() - (text == mask_id).long()
    return Decision(text, written, filled.masked_fill(~written, 0), revision.hold_block)


def block_width(blocks: Any) -> int:
    """The positions of a block where text moves, which takes blocks of one length."""
    width: int = blocks.length
    return width


def most_steps(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: the bound on the steps of the rows' open blocks. Where text moves, it is that of a block of masks."""
    opened = state.masks_at_open[rows]
    bound: np.ndarray = sampler.most_steps(
        np.full_like(opened, block_width(state.blocks)) if sampler.needs.moves else opened
    )
    return bound


def least(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: how many positions more than before must be decided after this step, so that the steps left suffice
    for the others; where text moves, the last step fills the block."""
    left: np.ndarray = most_steps(sampler, state, rows) - state.block_step[rows] - 1
    if sampler.needs.moves:
        return np.where(left > 0, -LONGEST_BLOCK, state.remaining[rows])
    return state.remaining[rows] - left


def shown_to_stop_rules(
    sampler: Any, state: MaskedState, rows: np.ndarray, decided: dict[str, np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray]:
    """Which rows [R] hold their block, and the window [R, W] as stop rules see it: what may be taken back ends
    nothing before a step has left it as it is."""
    held = decided.get("hold_block")
    closes = state.remaining[rows] <= 0
    if held is not None:
        held = held & (state.block_step[rows] < most_steps(sampler, state, rows))
        closes = closes & ~held
    open_still = ~closes[:, None] if sampler.needs.ends_with_block else decided["selected"] & ~closes[:, None]
    return held, np.where(open_still, state.facts.mask_id, decided["tokens"])
