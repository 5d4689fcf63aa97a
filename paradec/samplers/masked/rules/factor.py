"""Factor rule (Fast-dLLM, arXiv 2505.22618, section 3.3 and theorem 1; Fast-dLLM++, arXiv 2606.02955)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_bool, check_number
from paradec.samplers.masked.loop import MaskedSampler, View


@dataclass(frozen=True)
class Factor(MaskedSampler):
    """Per row, sort confidences c_(1) >= c_(2) >= ...; commit the longest prefix with (n + 1)(1 - c_(n)) <= factor, at
    least one position. Theorem 1: greedy parallel decoding of n tokens with confidences above 1 - e equals sequential
    decoding if (n + 1) e <= 1.

    Args:
        factor: right side of the rule; a larger factor commits more.
        reference_last_rank: True also commits the least confident position if no other position fails the rule, as the
            public code does. False is the published rule.
        profile: Fast-dLLM++'s rule, with e_i = 1 - c_(i): the longest prefix with e_1 + ... + e_n + e_n < 1 - margin.
            By Frechet's inequality all n tokens are right with a probability of at least 1 - (e_1 + ... + e_n). As this
            sum of errors is at most n e_n, margin 0 commits at least as much as factor 1, exact ties excepted.
        margin: margin of the profile rule, in [0, 1]; the rule's authors use 0.25 for all tasks (0.02 in one script).
    """

    factor: float = 1.0
    reference_last_rank: bool = False
    profile: bool = False
    margin: float = 0.25

    name = "factor"
    paper = "Fast-dLLM"
    arxiv = "2505.22618"
    summary = "the longest prefix of sorted confidences with (n + 1)(1 - c_n) <= factor"
    device_step = True
    sweep = ({"factor": 0.7}, {"factor": 1.9})

    def __post_init__(self) -> None:
        check_number("factor", self.factor, low=0)
        check_bool("reference_last_rank", self.reference_last_rank)
        check_bool("profile", self.profile)
        check_number("margin", self.margin, low=0, high=1)
        if self.profile and (self.factor != 1.0 or self.reference_last_rank):
            raise ValueError("factor and reference_last_rank do not work with profile=True: set margin instead")
        if not self.profile and self.margin != 0.25:
            raise ValueError(f"margin={self.margin} needs profile=True; without profile, set factor")

    def select(self, view: View) -> Tensor:
        ordered, order = view.scores.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
        if self.profile:
            errors = 1 - ordered
            passes = errors.cumsum(-1) + errors < 1 - self.margin
        else:
            passes = ordered >= 1 - self.factor / (rank + 1)
        if self.reference_last_rank:
            passes[:, 0] = True
        prefix = passes.int().cumprod(-1).bool()
        if self.reference_last_rank:
            candidates = view.candidates.sum(-1, keepdim=True)
            prefix = prefix | (prefix.sum(-1, keepdim=True) == candidates - 1) & (rank == candidates)
        return torch.zeros_like(prefix).scatter(-1, order, prefix) | view.best()
