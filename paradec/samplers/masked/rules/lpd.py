"""LPD's order on masked image models ("Locality-aware Parallel Decoding", arXiv 2507.01957, and its public code)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_number, short_repr
from paradec.core.orders import OrderDraws, check_sizes, group_sizes, lpd_order, lpd_repulsion, scale_sizes
from paradec.samplers.masked.rules.ordered import InOrder, check_grid, group_by_size
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class LPD(InOrder):
    """Per row and step, commit the next group of LPD's order (`paradec.core.orders.lpd_order`), which is drawn per row.
    The rule needs no training; the sampler `groups` decodes the paper's own models.

    The answer is an image in raster order. Cells of the prompt are decided from the start, and the first group is
    chosen near them.

    Args:
        groups: number of groups, or a list of their sizes. None is the request's `steps`; without `steps`, 20 for 256
            cells and 48 for 1024 cells as published, else 1.25 sqrt(cells). For a number, sizes are the published ones
            or scaled from these (`paradec.core.orders.group_sizes`). A list is scaled if the prompt contains cells.
        repulsion: Chebyshev distance that the cells of a group exceed, as long as undecided cells near decided cells
            are left. None is the published value: 2 below 1024 cells, else 4.
        proximity: an undecided cell is near decided ones if its nearness (`lpd_order`) is at least this.
        height, width: cells of the image; both or neither. The default is the squarest image that fits the answer.

    In the paper, guidance grows with the number of decided tokens. Only the sampler `groups` implements this; here
    guidance is constant.
    """

    groups: int | Sequence[int] | None = None
    repulsion: float | None = None
    proximity: float = 1.0

    name = "lpd"
    paper = "LPD"
    arxiv = "2507.01957"
    summary = "positions near decided ones and far from each other, in groups that grow"
    uses_steps = True
    draws = True
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", check_sizes(self.groups, "groups"))
        check_number("repulsion", self.repulsion, low=0, none=True)
        check_number("proximity", self.proximity, low=0)
        check_grid(self.height, self.width)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        super().check(facts, blocks, cache, longest)
        num_cells = longest if self.height is None or self.width is None else self.height * self.width
        if isinstance(self.groups, tuple) and sum(self.groups) != num_cells:
            total = f"groups={short_repr(self.groups)} add up to {sum(self.groups)}"
            raise ValueError(f"{total}; the picture has {num_cells} cells")

    def sizes(self, state: MaskedState, row: int, num_masks: int) -> tuple[int, ...]:
        """Compute the group sizes of a row with `num_masks` masks."""
        if isinstance(self.groups, tuple):
            return self.groups if sum(self.groups) == num_masks else scale_sizes(self.groups, num_masks)
        num_groups = self.groups if isinstance(self.groups, int) else None
        if num_groups is None and state.steps_per_block is not None:
            num_groups = int(state.steps_per_block[row])
        return group_sizes(num_masks, None if num_groups is None else min(num_groups, num_masks))

    def quota(self, state: MaskedState, rows: np.ndarray) -> np.ndarray:
        """Return the next group's size; for the last group, the number of remaining positions: [R] int64."""
        num_granted = state.remaining[rows].copy()
        for index, row in enumerate(rows):
            step, num_masks = int(state.block_step[row]), int(state.masks_at_open[row])
            sizes = self.sizes(state, row, num_masks) if num_masks else ()
            if step < len(sizes) - 1:
                num_granted[index] = min(sizes[step], num_granted[index])
        return num_granted

    def ranks(self, state: MaskedState) -> np.ndarray:
        is_prompt = state.is_prompt.cpu().numpy()
        keys = state.keys.tolist()
        window = state.window
        rank_of_position = np.zeros(window.host_positions.shape, np.int64)
        for indices, height, width, first_cell in group_by_size(state, self.height, self.width):
            for index, start in zip(indices, first_cell, strict=True):
                row = int(window.rows[index])
                is_decided = np.zeros(height * width, bool)  # cells of the image outside the row count as undecided
                prompt_cells = is_prompt[row, max(start, 0) : start + height * width]
                is_decided[max(-start, 0) :][: len(prompt_cells)] = prompt_cells
                repulsion = lpd_repulsion(height * width) if self.repulsion is None else self.repulsion
                sizes = self.sizes(state, row, num_masks=int((~is_decided).sum()))
                key = (keys[row][0], keys[row][1])
                ranks = lpd_ranks(height, width, sizes, repulsion, self.proximity, key, is_decided.tobytes())
                rank_of_position[index] = ranks[np.clip(window.host_positions[index] - start, 0, len(ranks) - 1)]
        return rank_of_position


@lru_cache(maxsize=1024)
def lpd_ranks(
    height: int,
    width: int,
    sizes: tuple[int, ...],
    repulsion: float,
    proximity: float,
    key: tuple[int, int],
    decided: bytes,
) -> np.ndarray:
    """Rank the cells in LPD's order: [height * width] int64; 0 for decided cells. decided: one byte (0, 1) per cell."""
    is_decided = np.frombuffer(decided, bool)
    order = lpd_order(height, width, sizes, OrderDraws(key), repulsion, proximity, is_decided)
    rank = np.zeros(height * width, np.int64)
    rank[order] = np.arange(len(order))
    rank.setflags(write=False)
    return rank
