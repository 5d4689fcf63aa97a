"""Methods that take back what they decided in the open block: what the base holds them to (`MaskedSampler.revise`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.contract import CanvasState
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import Decision, MaskedProposal, View


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


def least(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: how many positions more than before must be decided after this step, so that the steps left suffice
    for the others."""
    left: np.ndarray = sampler.most_steps(state.masks_at_open[rows]) - state.block_step[rows] - 1
    return state.remaining[rows] - left


def shown_to_stop_rules(
    sampler: Any, state: MaskedState, rows: np.ndarray, decided: dict[str, np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray]:
    """Which rows [R] hold their block, and the window [R, W] as stop rules see it: what may be taken back ends
    nothing before a step has left it as it is."""
    held = decided.get("hold_block")
    closes = state.remaining[rows] <= 0
    if held is not None:
        held = held & (state.block_step[rows] < sampler.most_steps(state.masks_at_open[rows]))
        closes = closes & ~held
    open_still = ~closes[:, None] if sampler.needs.ends_with_block else decided["selected"] & ~closes[:, None]
    return held, np.where(open_still, state.facts.mask_id, decided["tokens"])
