"""Dream's `alg="origin"` (Dream 7B, arXiv 2508.15487; the reverse process of MDLM, arXiv 2406.07524)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_number
from paradec.core.query import WindowQuery
from paradec.samplers.masked import reference
from paradec.samplers.masked.loop import MaskedSampler, Needs, View
from paradec.samplers.masked.rules.schedules import time_share
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class Origin(MaskedSampler):
    """Commit each masked position with probability 1 - s/t, where s follows t in the time grid linspace(1, eps, steps +
    1). The last step commits all remaining positions. Positions are random even at temperature 0. A step may commit
    nothing; `steps` bounds the number of steps.

    Args:
        eps: end of the time grid.
    """

    eps: float = 1e-3

    name = "origin"
    paper = "Dream 7B"
    arxiv = "2508.15487"
    summary = "commits each masked token independently, with the probability of the time grid"
    needs = Needs(score_from="sampled", may_wait=True, reference_draws="masked")
    uses_steps = True
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})
    draws = True

    def __post_init__(self) -> None:
        # unset the flag: `draw_tokens` differs from the base class only for draws with a generator
        object.__setattr__(self, "needs", replace(self.needs, draws_tokens=False))
        check_number("eps", self.eps, low=0, high=1, open_low=True)

    def share(self, state: MaskedState, rows: np.ndarray) -> np.ndarray:
        """Return the probability that a masked position becomes final at this step, [R] float32."""
        return time_share(state.block_step[rows], state.planned_steps(rows), self.eps)

    quota = share

    def draw_tokens(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> Tensor:
        if generator is None:
            return super().draw_tokens(state, logits, query, None)
        # as the public code: draw the positions that become final, then tokens only for these
        assert state.generator is not None
        if torch.equal(generator.get_state(), state.generator.get_state()):  # the first query of the step
            reference.position_noise(state, self.needs.reference_draws, generator)
        index = torch.as_tensor(query.window.index, device=logits.device)
        share = torch.as_tensor(self.share(state, query.rows), device=logits.device).unsqueeze(1)
        selected = self.position_noise(state, generator)[index] < share
        positions = state.window.positions[index]
        return reference.draw_categorical(state, logits, positions, query.rows, generator, selected)

    def position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        if generator is not None and state.request.temperature > 0:
            assert state.generator is not None
            generator = state.generator.clone_state()  # as it was before this step's tokens were drawn
        return super().position_noise(state, generator)

    def select(self, view: View) -> Tensor:
        return view.candidates & (view.draw() < torch.as_tensor(view.quota, device=view.scores.device).unsqueeze(1))
