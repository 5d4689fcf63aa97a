"""Averages of a few distributions: their statistics, which are not read twice. On the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import padded, scratch
from paradec.kernels.token_stats.draws import SEGMENT
from paradec.kernels.token_stats.portable import PART, cut

TINY = torch.finfo(torch.float32).tiny


class Averages:
    """Reads averages of distributions [V] one after the other, in the same memory."""

    def __init__(self, size: int):
        self.size = size
        *self._memory, spare = scratch((3, padded(size)), torch.device("cpu")).unbind(0)
        self._memory[0][size:] = 0
        self._parts = list(zip(*(cut(each, PART) for each in self._memory), strict=True))
        self.spare = spare[:size]
        """[V], for a distribution that is read once."""

    def of(self, distributions: Sequence[Tensor]) -> tuple[int, float, float]:
        """The best token of their average (the lowest index on ties), its probability, and minus the entropy."""
        total, share = self._memory[0], self._memory[0][: self.size]
        if len(distributions) == 1:
            share.copy_(distributions[0])
        else:
            torch.add(*distributions[:2], out=share)
        for each in distributions[2:]:
            share.add_(each)
        numbers = share.numpy()
        best = int(numbers.argmax())
        top = float(numbers[best])
        numbers[best] = 0
        others = _sum(total)
        # what is not the best token's, in float32; the sum beside it keeps how little that is
        for own, logarithm in self._parts:
            torch.clamp(own, min=TINY, out=logarithm).log_()
        products = np.vecdot(*(each.view(-1, SEGMENT).numpy() for each in self._memory))
        weight = float(products.sum(dtype=np.float64)) - others * math.log(top) if top > 0 else math.nan
        beside = others / top if top > 0 else math.nan
        return best, 1 / (1 + beside), weight / top / (1 + beside) - math.log1p(beside)


def _sum(numbers: Tensor) -> float:
    """By segments, so that the number of threads changes nothing."""
    return float(numbers.view(-1, SEGMENT).sum(-1).sum(dtype=torch.float64))
