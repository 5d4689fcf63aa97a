"""Random remasking (LLaDA, arXiv 2502.09992, and its generate.py, `remasking="random"`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_choice
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import View
from paradec.samplers.masked.rules.low_confidence import LowConfidence
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class Random(LowConfidence):
    """Commit as `low_confidence` does, but rank positions by uniform random numbers instead of confidence.

    Args:
        order: "step" draws the order at every step (LLaDA's generate.py), "block" once per block (the code of
            dKV-Cache-Greedy, which must know the next positions). The distribution is the same.
    """

    order: str = "step"

    name = "random"
    summary = "tokens in random order, in equal numbers per step"
    draws = True
    device_step = True

    def __post_init__(self) -> None:
        check_choice("order", self.order, ("step", "block"))

    def select(self, view: View) -> Tensor:
        return view.top(view.draw().masked_fill(~view.candidates, -torch.inf), view.quota)

    def preview(self, state: MaskedState) -> np.ndarray:
        window = state.window
        # the commit will draw the same numbers, since no other draw precedes it in the step
        generator = None if state.generator is None else state.generator.clone_state()
        candidates = window.undecided(window.read(state.canvas), state.facts.mask_id)
        scores = self.position_noise(state, generator).masked_fill(~candidates, -torch.inf)
        count = np.minimum(self.quota(state, window.rows), state.remaining[window.rows])
        ranking = scores.argsort(dim=-1, descending=True, stable=True)[:, : int(count.max())]
        positions = window.positions.gather(1, ranking).cpu().numpy()
        return np.where(np.arange(positions.shape[1]) < count[:, None], positions, -1)

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"order": MemorySpec(("position",), torch.float64)} if self.order == "block" else {}

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        if self.order == "step":
            return {}
        return {"order": view.memory["order"].scatter(1, view.positions, view.draw())}

    def position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        rows = state.window.rows
        if self.order == "step" or not state.block_step[rows].any():
            return super().position_noise(state, generator)
        if generator is not None:
            return state.window.read(state.memory["order"])
        positions = state.window.positions
        open_step = torch.as_tensor((state.row_step - state.block_step)[rows], device=positions.device)
        keys = state.keys[torch.as_tensor(rows, device=positions.device)]
        return rng.uniform(keys, open_step, positions, 1, rng.POSITION_STREAM).squeeze(-1)
