"""MaskGIT (arXiv 2202.04200; public code). "MaskGIT-r" is AutoNAT's variant, as in ReCAP's code (arXiv 2505.19089)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_choice, check_number
from paradec.core.query import WindowQuery
from paradec.kernels.token_stats import draw
from paradec.samplers.distributions import apply_temperature
from paradec.samplers.masked import reference
from paradec.samplers.masked.drawing import token_draws
from paradec.samplers.masked.loop import LAST, MaskedProposal, MaskedSampler, MaskedState, Needs, View

REDRAW_STREAM = 2
"""Random stream (`paradec.core.rng`) of the second draw."""
SCHEDULES = ("cosine", "arccos", "linear", "power")


@dataclass(frozen=True)
class MaskGIT(MaskedSampler):
    """Per row and step t = 0 ... T - 1, draw a token everywhere, and commit the positions with the highest

            ln p(token) + choice_temperature * (1 - (t + 1) / T) * Gumbel noise.

    Set `steps` (T; 8 to 12 in the paper) and `temperature=1`, as in the paper. With the defaults of `paradec.generate`,
    a step commits one position, which gets its best token.

    Args:
        schedule: number of masks that remain after step t, of n at the start, rounded down. With r = (t + 1) / T, it is
            n cos(pi r / 2) for "cosine" (the paper's), n 2 arccos(r) / pi for "arccos" (Halton-MaskGIT's), n (1 - r)
            for "linear" and n (1 - r ** 2.5) for "power" (MaskGIT-r's). Every step commits at least one token.
        choice_temperature: weight of the noise; 4.5 in the paper's code.
        final_temperature: None commits the drawn token. s in (0, 1] (MaskGIT-r: 0.65 to 0.75) commits a second draw, at
            the temperature s + (1 - s) (1 - sqrt(t / (T - 1))). At `temperature` 0 there is no second draw.
        guidance_start: guidance scale at the first step; from there it grows linearly to the request's
            `guidance_scale` at the last step. None uses the request's scale at all steps.

    The reported confidence is the probability of the first draw. The noise is 0 in the last step, as in the paper's
    code. diffusers' AmusedScheduler scales the noise by 2 (1 - t / (T - 1)).
    """

    schedule: str = "cosine"
    choice_temperature: float = 4.5
    final_temperature: float | None = None
    guidance_start: float | None = None

    name = "maskgit"
    paper = "MaskGIT"
    arxiv = "2202.04200"
    summary = "the most confident tokens, with noise; more of them from step to step"
    uses_steps = True
    draws = True
    needs = Needs(reference_draws="masked")
    presets = {"maskgit-r": {"schedule": "power", "choice_temperature": 5.5, "final_temperature": 0.65}}
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_number("choice_temperature", self.choice_temperature, low=0)
        check_number("final_temperature", self.final_temperature, low=0, high=1, none=True, open_low=True)
        check_number("guidance_start", self.guidance_start, low=0, none=True)

    def quota(self, state: MaskedState, rows: np.ndarray) -> np.ndarray:
        return self.quota_at(state, rows, *self.block_progress(state, rows))

    def quota_at(self, state: MaskedState, rows: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Compute the quota at `step` of `steps`, both [R]: [R] int64; in the last step, all remaining positions."""
        remaining = state.remaining[rows]
        quota = remaining.copy()
        plans, plan_index = np.unique(np.stack((state.masks_at_open[rows], steps)), axis=1, return_inverse=True)
        for index, (masks, planned) in enumerate(plans.T):  # rows nearly always share one plan
            is_early = (plan_index.reshape(-1) == index) & (step < planned - 1)
            quota[is_early] = np.array(commit_counts(self.schedule, int(masks), int(planned)))[step[is_early]]
        return np.minimum(quota, remaining)

    def block_progress(self, state: MaskedState, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the open block's step t and number of steps T, both [R] int64."""
        planned = np.minimum(state.planned_steps(rows), np.maximum(state.masks_at_open[rows], 1))
        return np.minimum(state.block_step[rows], planned - 1), planned

    def noise_at(self, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Compute the scale of the Gumbel noise at `step` of `steps`, both [R]: [R] float64."""
        return self.choice_temperature * (1 - (step + 1) / steps)

    def temperature_at(self, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Compute the falling temperature of the second draw at `step` of `steps`, both [R]: [R] float64."""
        assert self.final_temperature is not None
        return 1 - (1 - self.final_temperature) * np.sqrt(step / np.maximum(steps - 1, 1))

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        noise_scale = self.noise_at(*self.block_progress(state, proposal.rows))
        scale = torch.as_tensor(noise_scale, device=proposal.values.device)
        proposal.quantities["noise_scale"] = scale.unsqueeze(1).expand(proposal.values.shape)
        return proposal

    def guidance(self, state: MaskedState, rows: np.ndarray) -> float | Tensor:
        if self.guidance_start is None:
            return super().guidance(state, rows)
        return self.guidance_at(state, *self.block_progress(state, rows))

    def guidance_at(self, state: MaskedState, step: np.ndarray, steps: np.ndarray) -> Tensor:
        """Compute the growing guidance scale at `step` of `steps`, both [R]: [R, 1, 1]."""
        assert self.guidance_start is not None
        final_scale = state.request.guidance_scale
        scale = self.guidance_start + (final_scale - self.guidance_start) * step / np.maximum(steps - 1, 1)
        return torch.as_tensor(scale, device=state.canvas.device).view(-1, 1, 1)

    def weighs_mask(self, state: MaskedState) -> bool:
        return False  # the public code has no logit for the mask

    def read_candidates(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, quantities = super().read_candidates(state, logits, query, generator)
        if self.final_temperature is None or state.request.temperature == 0:
            return tokens, quantities
        tau = self.temperature_at(*self.block_progress(state, query.rows)).clip(np.finfo(np.float64).tiny)  # not 0
        cooled = apply_temperature(logits.double(), torch.as_tensor(tau, device=tokens.device).view(-1, 1, 1))
        return self._redraw(state, cooled, query, generator), quantities

    def _redraw(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V]), independently of the first draw."""
        if generator is None:
            return draw(logits.softmax(-1), token_draws(state, query, stream=REDRAW_STREAM).uniform())
        positions = state.window.query_positions(query)
        noise = reference.gumbel_uniform(state, logits.shape[-1], query.rows, positions, generator)
        return (logits + rng.gumbel(noise)).argmax(-1)

    def select(self, view: View) -> Tensor:
        return view.top(noisy_scores(view), view.quota)


def noisy_scores(view: View) -> Tensor:
    """Compute ln p + noise at undecided positions, -inf elsewhere: [R, W] float64."""
    # a score below 0 is not a probability but ranks an end token last
    log_p = torch.where(view.scores > 0, view.scores, 1.0).log()
    log_p = torch.where(view.scores == 0, -1e4, log_p)
    log_p = torch.where(view.scores < 0, LAST, log_p + view.quantities["noise_scale"] * rng.gumbel(view.draw()))
    return log_p.masked_fill(~view.candidates, -torch.inf)


@lru_cache(maxsize=1024)
def commit_counts(schedule: str, num_masks: int, steps: int) -> tuple[int, ...]:
    """Compute how many of `num_masks` positions each of `steps` <= num_masks steps commits, at least 1. Where the
    schedule gives 0, the count is 1, and other counts shrink: with "cosine", "arccos" and "linear" the next counts;
    with "power" the last count, as in the public code, and the largest counts if the last would be less than 1."""
    ratio = (np.arange(steps) + 1) / steps
    masks_left = {
        "cosine": np.cos(math.pi / 2 * ratio),
        "arccos": np.arccos(ratio) / (math.pi / 2),
        "linear": 1 - ratio,
        "power": 1 - ratio**2.5,
    }[schedule]
    masks_left = np.floor(num_masks * masks_left).astype(int)
    masks_left[-1] = 0
    if schedule == "power":
        num_committed = np.maximum(-np.diff(masks_left, prepend=num_masks), 1)
        num_committed[-1] = num_masks - num_committed[:-1].sum()
        while num_committed[-1] < 1:
            num_committed[:-1][num_committed[:-1].argmax()] -= 1
            num_committed[-1] += 1
        return tuple(num_committed.tolist())
    result, remaining = [], num_masks
    for step in range(steps):
        result.append(int(np.clip(remaining - masks_left[step], 1, remaining - (steps - 1 - step))))
        remaining -= result[-1]
    return tuple(result)
