"""Halton-MaskGIT: positions in the order of a low-discrepancy sequence, so that what is decided together stands apart.

Besnier et al., "Halton Scheduler for Masked Generative Image Transformer", arXiv 2503.17076, and its public code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.blocks import BlockPolicy
from paradec.caches.base import Cache
from paradec.canvas import CanvasState
from paradec.checks import check_int
from paradec.protocol import Query
from paradec.samplers.masked.base import MaskedProposal, MaskedState, View
from paradec.samplers.masked.maskgit import MaskGIT

POINTS = 10_000
"""Points of the sequence that are looked at, as in the public code; cells that none of them hits come last."""


@dataclass(frozen=True)
class Halton(MaskGIT):
    """Per row and step, commit the next `quota` positions of the Halton order, whatever their confidence.

    The answer is read as an image, row by row. Point n of the two-dimensional Halton sequence (bases 2 and 3, from
    n = 1) falls into a cell of it, its row by base 2; cells come in the order in which they are first hit.

    Args:
        height, width: cells of the image; both or neither. Left out, the squarest image that holds the answer.
        schedule: as `maskgit`; the paper's is "arccos".
        choice_temperature: no effect: there is no confidence.
        final_temperature, guidance_start: as `maskgit`.

    What a step commits is known before the model is called. The public code's warm-up of the temperature and its random
    shift of the order per image are left out.
    """

    schedule: str = "arccos"
    choice_temperature: float = 0.0
    height: int | None = None
    width: int | None = None

    name = "halton"
    paper = "Halton-MaskGIT"
    arxiv = "2503.17076"
    summary = "positions in Halton order, in numbers that grow from step to step"
    presets = {}
    frontier = ({"steps": 1 / 4}, {"steps": 1 / 8})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grid(self.height, self.width)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        check_grid(self.height, self.width, longest)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[Query]) -> MaskedProposal:
        """The base's proposal, with the "rank" of every position in the order, [R, W]."""
        proposal = super().propose(state, outputs, queries)
        rank = halton_ranks(state, self.height, self.width)
        proposal.quantities["rank"] = torch.as_tensor(rank, device=proposal.values.device).double()
        return proposal

    def select(self, view: View) -> Tensor:
        return view.top((-view.quantities["rank"]).masked_fill(~view.candidates, -torch.inf), view.quota)

    def announce(self, state: CanvasState) -> np.ndarray:
        window = state.window
        current = window.read(state.canvas)
        undecided = window.undecided(current, state.facts.mask_id).cpu().numpy()
        count = np.minimum(self.quota(state, window.rows), undecided.sum(1))
        rank = np.where(undecided, halton_ranks(state, self.height, self.width), np.iinfo(np.int64).max)
        order = rank.argsort(1, kind="stable")[:, : int(count.max())]
        picks = np.take_along_axis(window.host_positions, order, 1)
        return np.where(np.arange(picks.shape[1]) < count[:, None], picks, -1)


def check_grid(height: int | None, width: int | None, longest: int = 0) -> None:
    """Raise ValueError unless both or neither are given, and `longest` positions fit."""
    check_int("height", height, low=1, high=2**16, none=True)
    check_int("width", width, low=1, high=2**16, none=True)
    if (height is None) != (width is None):
        raise ValueError(f"height={height} and width={width} go together: give both, or neither")
    if height is not None and width is not None and height * width < longest:
        raise ValueError(f"height={height} times width={width} is less than the {longest} positions to decide")


def halton_ranks(state: CanvasState, height: int | None, width: int | None) -> np.ndarray:
    """[R, W] int64: where each position of the window comes in the order. The image is what stands last in a row."""
    rows = state.window.rows
    cells = state.length[rows] - state.prompt_length[rows]
    if height is not None and width is not None:
        cells = np.full(len(rows), height * width)
    found = np.zeros(state.window.host_positions.shape, np.int64)
    for size in np.unique(cells):  # rows nearly always share one
        same = cells == size
        columns = width or math.isqrt(int(size) - 1) + 1
        order = halton_order(height or -(-int(size) // columns), columns)
        cell = state.window.host_positions[same] - (state.length[rows[same]] - size)[:, None]
        found[same] = order[np.clip(cell, 0, len(order) - 1)]  # the window's padding may lie outside
    return found


@lru_cache(maxsize=64)
def halton_order(height: int, width: int) -> np.ndarray:
    """[height * width] int64: the rank of each cell, row by row."""
    n = np.arange(1, POINTS + 1)
    cells = (_radical_inverse(n, 2) * height).astype(int) * width + (_radical_inverse(n, 3) * width).astype(int)
    hit, first = np.unique(cells, return_index=True)
    rank = np.full(height * width, POINTS, np.int64)
    rank[hit] = first
    rank[rank.argsort(kind="stable")] = np.arange(height * width)
    rank.setflags(write=False)
    return rank


def _radical_inverse(n: np.ndarray, base: int) -> np.ndarray:
    """The digits of n in `base`, mirrored at the point: the Halton sequence's coordinate in [0, 1)."""
    value, scale = np.zeros(len(n)), 1.0
    while n.any():
        scale /= base
        value, n = value + scale * (n % base), n // base
    return value
