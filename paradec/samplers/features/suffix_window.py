"""A window of the masks after the open block (`paradec.Suffix`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paradec.caches.suffix import Suffix
from paradec.core.rows import row_layout
from paradec.samplers.features.feature import Feature


@dataclass
class SuffixWindow(Feature):
    """What exists of each row while its open block is open."""

    suffix: Suffix
    present: np.ndarray = field(metadata=row_layout(columns=1))
    """[B, L] bool: other positions are neither evaluated nor seen."""

    host_only = "what exists of a suffix changes with the blocks, on the host"

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """Choose what exists of `rows` [N] while the blocks that they have opened are open."""
        if not len(rows):
            return
        masks = np.diff(state.masks_before[rows], axis=1) > 0
        start, end, column = state.block_start[rows], state.block_end[rows], state.columns[0]
        keys = state.keys[torch.as_tensor(rows, device=state.keys.device)]
        chosen = self.suffix.kept(masks, start, end, keys, state.generator, state.facts.prediction)
        present = (~masks | (column < end[:, None]) | chosen) & (column < state.length[rows, None])
        self.present[rows] = present
        if state.store is not None:
            for branch in range(state.branches):
                state.store.hide(rows + branch * state.batch, ~present)
