"""Selection of some of the masks after the open block (`paradec.Suffix`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paradec.caches.base import Cache
from paradec.caches.suffix import Suffix
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import short_repr
from paradec.core.rows import row_layout
from paradec.request import Request
from paradec.samplers.features.feature import Feature
from paradec.samplers.masked.blocks import WholeCanvas


@dataclass
class SuffixWindow(Feature):
    """Positions of each row that are present while its block is open."""

    suffix: Suffix
    present: np.ndarray = field(metadata=row_layout(columns=1))
    """[B, L] bool. Other positions are neither evaluated nor attended to."""

    why_host_only = "the host chooses a suffix for each block"

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        """Choose the present positions of `rows` [N], which have opened a block."""
        if not len(rows):
            return
        masks = np.diff(state.masks_before[rows], axis=1) > 0
        start, end, column = state.block_start[rows], state.block_end[rows], state.columns[0]
        keys = state.keys[torch.as_tensor(rows, device=state.keys.device)]
        selected = self.suffix.choose_masks(masks, start, end, keys, state.generator, state.facts.prediction)
        is_present = (~masks | (column < end[:, None]) | selected) & (column < state.length[rows, None])
        self.present[rows] = is_present
        if state.store is not None:
            for branch in range(state.branches):
                state.store.clear_absent(rows + branch * state.batch, ~is_present)


def check_suffix(
    request: Request, sampler: Any, model: Any, cache: Cache, blocks: BlockPolicy, rows: int, holes: bool, early: bool
) -> None:
    """Raise ValueError with the reason if the request's suffix does not work. rows: number of rows. holes: whether
    masks precede prompt tokens. early: whether the request has early stop rules."""
    suffix = Suffix.from_value(request.suffix)
    assert suffix is not None  # callers have checked `request.suffix`
    why = suffix.why_unsupported(sampler, model, cache, holes)
    if why is None and isinstance(blocks, WholeCanvas):
        why = "one block is the whole answer, so that no position follows it; give block_length"
    if why is None and early:
        why = f"stop={short_repr(request.stop)} reads all positions after the block; leave stop out"
    if why is None and request.rng == "reference" and suffix.density != "cut" and rows > 1:
        why = f"rng='reference' draws a suffix for only one row, not for {rows}; use rng='counter'"
    if why is not None:
        raise ValueError(f"suffix={short_repr(suffix)} does not work here: {why}")
