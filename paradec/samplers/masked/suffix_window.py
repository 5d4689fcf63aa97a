"""Which masks after the open block exist for now: what `paradec.Suffix` leaves out of a row."""

from __future__ import annotations

import numpy as np
import torch

from paradec.caches.suffix import Suffix
from paradec.core.contract import CanvasState


def cut(state: CanvasState, rows: np.ndarray) -> None:
    """Choose what exists of `rows` [N] while the blocks that they have opened are open."""
    if not len(rows):
        return
    assert state.present is not None
    suffix = Suffix.of(state.request.suffix)
    assert suffix is not None
    masks = np.diff(state.masks_before[rows], axis=1) > 0
    start, end, column = state.block_start[rows], state.block_end[rows], state.columns[0]
    keys = state.keys[torch.as_tensor(rows, device=state.keys.device)]
    kept = suffix.kept(masks, start, end, keys, state.generator, state.facts.prediction)
    there = (~masks | (column < end[:, None]) | kept) & (column < state.length[rows, None])
    state.present[rows] = there
    if state.store is not None:
        for branch in range(state.branches):
            state.store.hide(rows + branch * state.batch, ~there)


def ends_now(state: CanvasState, rows: np.ndarray) -> np.ndarray:
    """[N] int64: the position after the last one of `rows` [N] that exists for now."""
    assert state.present is not None
    last: np.ndarray = state.present.shape[1] - state.present[rows, ::-1].argmax(1)
    return np.minimum(last, state.length[rows])
