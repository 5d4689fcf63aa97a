"""Random remasking: positions become final in random order.

Nie et al., "Large Language Diffusion Models" (LLaDA), arXiv 2502.09992, and its generate.py (`remasking="random"`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.samplers.low_confidence import LowConfidence
from paradec.samplers.masked import View


@dataclass(frozen=True)
class Random(LowConfidence):
    """As `low_confidence`, with uniform random numbers in place of the confidence when positions are ranked."""

    name = "random"
    summary = "tokens in random order, in equal numbers per step"

    def select(self, view: View) -> Tensor:
        return view.top(view.draw().masked_fill(~view.candidates, -torch.inf), view.quota)
