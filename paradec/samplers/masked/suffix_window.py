"""Which masks after the open block exist for now: what `paradec.Suffix` leaves out of a row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from paradec.caches.suffix import Suffix
from paradec.core.rows import row_layout
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker


@dataclass
class SuffixWindow(Tracker):
    """What exists of each row while its open block is open."""

    suffix: Suffix
    present: np.ndarray = field(metadata=row_layout(columns=1))

    host_only = "what exists of a suffix changes with the blocks, on the host"

    def opened(self, state: MaskedState, rows: np.ndarray) -> None:
        """Choose what exists of `rows` [N] while the blocks that they have opened are open."""
        if not len(rows):
            return
        masks = np.diff(state.masks_before[rows], axis=1) > 0
        start, end, column = state.block_start[rows], state.block_end[rows], state.columns[0]
        keys = state.keys[torch.as_tensor(rows, device=state.keys.device)]
        kept = self.suffix.kept(masks, start, end, keys, state.generator, state.facts.prediction)
        there = (~masks | (column < end[:, None]) | kept) & (column < state.length[rows, None])
        self.present[rows] = there
        if state.store is not None:
            for branch in range(state.branches):
                state.store.hide(rows + branch * state.batch, ~there)


def ends_now(present: np.ndarray, length: np.ndarray) -> np.ndarray:
    """[N] int64: the position after the last one that exists for now of rows that have `present` [N, L] and `length`
    [N]."""
    last: np.ndarray = present.shape[1] - present[:, ::-1].argmax(1)
    return np.minimum(last, length)
