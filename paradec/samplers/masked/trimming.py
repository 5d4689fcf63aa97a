"""Rows that a method cuts off before their end (`MaskedSampler.trim`)."""

from __future__ import annotations

import numpy as np
import torch

from paradec.samplers.masked.state import MaskedState


def trim(state: MaskedState, cut: np.ndarray, tokens: np.ndarray) -> None:
    """Cut the running rows off at `cut` [R]; the window [R, W] holds `tokens`, and is to be made again."""
    window = state.window
    shorter = cut < state.length[window.rows]
    rows, cut = window.rows[shorter], cut[shorter]
    state.length[rows], state.level = cut, False
    state.end[rows] = np.minimum(state.end[rows], cut)
    state.block_end[rows] = np.minimum(state.block_end[rows], cut)
    left = tokens[shorter] == state.facts.mask_id
    left &= window.host_positions[shorter] < state.block_end[rows, None]
    if window.host_valid is not None:
        left &= window.host_valid[shorter]
    state.remaining[rows] = left.sum(1)
    state.forget_made()
    if state.store is not None:
        for branch in range(state.branches):
            state.store.forget(rows + branch * state.batch, cut)
    column = torch.arange(state.canvas.shape[1], device=state.canvas.device)
    tail = column >= torch.as_tensor(state.length, device=column.device).unsqueeze(1)
    state.canvas.masked_fill_(tail, state.facts.fill_token_id)
