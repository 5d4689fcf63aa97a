"""Rows that an `EarlyRule` ends: what is undecided takes this step's candidates, all at once."""

from __future__ import annotations

import numpy as np
import torch

from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import Decision, MaskedProposal


def fill(state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
    """Take the candidates of all that is undecided in rows that a stop rule ends early."""
    assert proposal.early is not None
    early = proposal.early.unsqueeze(1)
    undecided = state.window.undecided(proposal.current, state.mask_id)
    decision.values = torch.where(early, proposal.values, decision.values)
    decision.selected = torch.where(early, undecided, decision.selected)
    decision.filled = torch.where(early, undecided.to(decision.filled.dtype), decision.filled)
    if decision.hold_block is not None:
        decision.hold_block = decision.hold_block & ~proposal.early


def close_full_rows(state: MaskedState, tokens: np.ndarray) -> None:
    """Make the open block the last one of rows with nothing undecided. tokens: [R, W], of a window that reaches the
    end of every row."""
    window = state.window
    masks = tokens == state.facts.mask_id
    if window.host_valid is not None:
        masks &= window.host_valid
    rows = window.rows[~masks.any(1)]
    state.block_end[rows], state.remaining[rows] = state.length[rows], 0
