"""Masked samplers that commit the positions of an image in an order that does not depend on confidence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_int
from paradec.core.query import WindowQuery
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, MaskedState, View


@dataclass(frozen=True)
class InOrder(MaskedSampler):
    """Commit positions in an order that is known before the model is called. The answer is an image in raster order. A
    subclass implements `ranks`, the order, and `quota`, the number of positions per step."""

    height: int | None = None
    width: int | None = None

    def ranks(self, state: MaskedState) -> np.ndarray:
        """Rank the window's positions in the order: [R, W] int64."""
        raise NotImplementedError

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        check_grid(self.height, self.width, longest)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        proposal.quantities["rank"] = torch.as_tensor(self.ranks(state), device=proposal.values.device).double()
        return proposal

    def select(self, view: View) -> Tensor:
        return view.top((-view.quantities["rank"]).masked_fill(~view.candidates, -torch.inf), view.quota)

    def preview(self, state: MaskedState) -> np.ndarray:
        window = state.window
        current = window.read(state.canvas)
        undecided = window.undecided(current, state.facts.mask_id).cpu().numpy()
        count = np.minimum(self.quota(state, window.rows), undecided.sum(1))
        rank = np.where(undecided, self.ranks(state), np.iinfo(np.int64).max)
        order = rank.argsort(1, kind="stable")[:, : int(count.max())]
        positions = np.take_along_axis(window.host_positions, order, 1)
        return np.where(np.arange(positions.shape[1]) < count[:, None], positions, -1)


def check_grid(height: int | None, width: int | None, longest: int = 0) -> None:
    """Raise ValueError unless height and width are both set or both None, and `longest` positions fit."""
    check_int("height", height, low=1, high=2**16, none=True)
    check_int("width", width, low=1, high=2**16, none=True)
    if (height is None) != (width is None):
        raise ValueError(f"height={height} and width={width} go together: give both, or neither")
    if height is not None and width is not None and height * width < longest:
        raise ValueError(f"height={height} times width={width} is less than the {longest} positions to decide")


def group_by_size(
    state: MaskedState, height: int | None, width: int | None
) -> Iterator[tuple[np.ndarray, int, int, np.ndarray]]:
    """Group the images of the running rows by size. Yields, for each size, the indices [N] of the window's rows, height
    and width in cells, and the first cells' positions [N]. An image is the last `height` * `width` positions of a row;
    without these settings, the squarest image for the answer, whose last cells may lie beyond the row."""
    rows = state.window.rows
    num_cells = state.length[rows] - state.prompt_length[rows]
    if height is not None and width is not None:
        num_cells = np.full(len(rows), height * width)
    for size in np.unique(num_cells):  # rows nearly always share one size
        indices = np.flatnonzero(num_cells == size)
        columns = width or math.isqrt(int(size) - 1) + 1
        yield indices, height or -(-int(size) // columns), columns, state.length[rows[indices]] - size
