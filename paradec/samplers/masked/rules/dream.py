"""Dream's four rules (Dream 7B, arXiv 2508.15487, and its generation_utils.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_number, check_temperature
from paradec.samplers.distributions import apply_temperature
from paradec.samplers.masked.loop import LAST, MaskedSampler, Needs, View
from paradec.samplers.masked.rules.schedules import time_grid, time_share
from paradec.samplers.masked.state import MaskedState


@dataclass(frozen=True)
class DreamSampler(MaskedSampler):
    """Commit a share 1 - s/t of the masked positions per step, the most confident first, where s follows t in the time
    grid linspace(1, eps, steps + 1).

    Args:
        alg_temp: a value above 0 (at least 1e-6) draws positions without replacement from softmax(score / alg_temp).
            None or 0 commits the highest scores.
        eps: end of the time grid.

    The share is that of each row's masked positions; in the public code, of the batch's mean number. Early steps may
    commit nothing, since the number is rounded down; `steps` bounds the number of steps.
    """

    alg_temp: float | None = None
    eps: float = 1e-3

    paper = "Dream 7B"
    arxiv = "2508.15487"
    needs = Needs(score_from="sampled", may_wait=True)
    uses_steps = True
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})

    def __post_init__(self) -> None:
        check_temperature("alg_temp", self.alg_temp, none=True)
        check_number("eps", self.eps, low=0, high=1, open_low=True)
        object.__setattr__(self, "draws", bool(self.alg_temp))

    def quota(self, state: MaskedState, rows: Any) -> Any:
        remaining, step, planned = state.remaining[rows], state.block_step[rows], state.planned_steps(rows)
        if not isinstance(step, Tensor):
            return time_grid(remaining, step, planned, self.eps)
        # the device step reads the same shares from a table
        engine: Any = state
        shares = engine.tables.get(self.eps)
        if shares is None:
            longest = engine.longest_plan
            steps_planned, steps_taken = np.divmod(np.arange((longest + 1) * longest), longest)
            table = time_share(steps_taken, steps_planned, self.eps).reshape(longest + 1, longest)
            shares = engine.tables[self.eps] = torch.as_tensor(table, device=step.device)
        share = shares[planned, step.clamp(max=engine.longest_plan - 1)]
        return torch.where(step >= planned - 1, remaining, (remaining.float() * share).long())

    def select(self, view: View) -> Tensor:
        if not self.alg_temp:
            return view.top(view.scores, view.quota)
        scores = apply_temperature(view.scores, self.alg_temp).clamp(min=LAST)
        return view.choose(scores.masked_fill(~view.candidates, -torch.inf), view.quota)
