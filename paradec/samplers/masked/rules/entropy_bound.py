"""EB-Sampler ("Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking", arXiv 2505.24857)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_number
from paradec.samplers.masked.loop import LAST, MaskedSampler, Needs, View


@dataclass(frozen=True)
class EntropyBound(MaskedSampler):
    """Per row, sort entropies H_(1) <= H_(2) <= ...; commit the longest prefix with H_(1) + ... + H_(k-1) <= gamma, at
    least one position. The left side is the prefix's sum without its maximum. It bounds the mutual information of the
    prefix's tokens, and so the error of drawing them independently.

    Args:
        gamma: the bound in nats, at least 0. Usual values for text are 0.001 to 0.1.

    Entropies are those of the distribution that tokens are drawn from: filtered, and at a temperature above 0 also
    tempered.
    """

    gamma: float = 0.1

    name = "entropy_bound"
    paper = "EB-Sampler"
    arxiv = "2505.24857"
    summary = "the longest prefix of sorted entropies whose sum, without the largest, is at most gamma"
    device_step = True
    needs = Needs(score="minus_entropy", score_from="sampled")
    sweep = ({"gamma": 0.01}, {"gamma": 0.5})

    def __post_init__(self) -> None:
        check_number("gamma", self.gamma, low=0)

    def select(self, view: View) -> Tensor:
        ordered, order = view.scores.sort(dim=-1, descending=True, stable=True)
        sum_before = torch.zeros_like(ordered)
        sum_before[:, 1:] = -ordered[:, :-1].cumsum(-1)
        # exclude positions that may not be committed, and end tokens that must come last
        fits = (sum_before <= self.gamma) & (ordered > LAST)
        return torch.zeros_like(fits).scatter(-1, order, fits) | view.best()
