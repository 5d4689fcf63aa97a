"""Blocks that end where a step's logits say (`paradec.AdaptiveBlocks`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paradec.core.blocks import Opening
from paradec.samplers.masked.state import MaskedState


def read(state: MaskedState, tokens: Tensor, confidence: Tensor, available: Tensor) -> Tensor | None:
    """Where each running row's block ends, [R] int64, if the candidates [R, W] decide it for any; else None."""
    rows = state.window.rows
    index = state.opening[rows].nonzero()[0]
    if not len(index):
        return None
    opened, device = rows[index], tokens.device
    start, end = torch.as_tensor(np.stack((state.block_start[rows], state.block_end[rows])), device=device)
    at = torch.as_tensor(index, device=device)
    opening = Opening(
        tokens=tokens[at],
        confidence=confidence[at],
        available=available[at],
        start=state.block_start[opened],
        prompt_length=state.prompt_length[opened],
        length=state.length[opened],
    )
    # the block reaches what can be committed, where given text comes first
    size = state.blocks.cut(opening).maximum(opening.available.int().argmax(1) + 1)
    return end.index_copy(0, at, start[at] + size)


def settle(state: MaskedState, rows: np.ndarray, end: np.ndarray) -> None:
    """Let the blocks of `rows` [R] end at `end` [R], as `read` has it."""
    read = state.opening[rows]
    rows, end = rows[read], end[read]
    if (end > state.block_end[rows]).any():
        raise RuntimeError(f"blocks={state.blocks} cut a block that is longer than what it read")
    state.block_end[rows] = end
    masks = state.masks_before[rows, end] - state.masks_before[rows, state.block_start[rows]]
    state.masks_at_open[rows] = state.remaining[rows] = masks
    state.opening[rows] = False
