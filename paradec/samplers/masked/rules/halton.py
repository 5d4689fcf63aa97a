"""Halton-MaskGIT ("Halton Scheduler for Masked Generative Image Transformer", arXiv 2503.17076; its public code)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paradec.core.orders import halton_order
from paradec.samplers.masked.rules.maskgit import MaskGIT
from paradec.samplers.masked.rules.ordered import InOrder, check_grid, group_by_size
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class Halton(InOrder, MaskGIT):
    """Per row and step, commit the next positions of the Halton order, at any confidence; `schedule` sets the number.

    The answer is an image in raster order. Point n of the two-dimensional Halton sequence (n = 1, 2, ...; base 2 gives
    the row, base 3 the column) falls into a cell. Cells are decided in the order of their first points.

    Args:
        height, width: cells of the image; both or neither. The default is the squarest image that fits the answer.
        schedule: as in `maskgit`; the paper's is "arccos".
        choice_temperature: no effect, since the order does not depend on confidence.
        final_temperature, guidance_start: as in `maskgit`.

    The public code's warm-up of the temperature and its random shift of the order per image are not implemented.
    """

    schedule: str = "arccos"
    choice_temperature: float = 0.0

    name = "halton"
    paper = "Halton-MaskGIT"
    arxiv = "2503.17076"
    summary = "positions in Halton order; more of them from step to step"
    needs = MaskGIT.needs
    draws = False
    presets = {}
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grid(self.height, self.width)

    def ranks(self, state: MaskedState) -> np.ndarray:
        return halton_ranks(state, self.height, self.width)


def halton_ranks(state: MaskedState, height: int | None, width: int | None) -> np.ndarray:
    """Rank the window's positions in Halton order: [R, W] int64."""
    ranks = np.zeros(state.window.host_positions.shape, np.int64)
    for indices, rows, columns, first_cell in group_by_size(state, height, width):
        cell_ranks = halton_order(rows, columns)
        cell = state.window.host_positions[indices] - first_cell[:, None]
        ranks[indices] = cell_ranks[np.clip(cell, 0, len(cell_ranks) - 1)]  # padding may lie outside of the image
    return ranks
