"""What filters keep, by its least logit, found without a sort of the vocabulary. On the CPU, in float32 or float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats.draws import SEGMENT
from paradec.kernels.token_stats.portable import FLOOR, LANES, LOG2_E

SAMPLED = 61
"""Every so many tokens are sorted, to guess where the nucleus ends."""
FEW = 64
"""So many of these are left when all between them are sorted: some 4,000 tokens."""


def kth_best(row: Tensor, count: int) -> float:
    """The `count`-th largest of logits [V]. So many segments have one as large as the `count`-th largest of the
    segments' largest, and all that are larger lie in these."""
    values = row.numpy()
    whole = len(values) // SEGMENT * SEGMENT
    if count < whole // SEGMENT:
        segments, rest = row[:whole].view(-1, SEGMENT), values[whole:]
        tops = segments.amax(-1).numpy()
        least = np.partition(tops, len(tops) - count)[len(tops) - count]
        values = np.concatenate((segments.numpy()[tops >= least].reshape(-1), rest))
    # numpy's search takes ten times as long over rows that are mostly -inf; from the other end it does not
    return -float(np.partition(-values, count - 1)[count - 1])


class Bounds:
    """What the filters keep of one row after the other, in the same memory.

    A nucleus holds a token if the shares of those before it add up to no more than `top_p`. Shares are as `token_stats`
    has them, and added up in float64. Of what is in it, `top_k` leaves the best and what equals the last of them.

    Args:
        size, dtype: V, and float32 or float64.
        top_p: below 1; None keeps all. top_k: None keeps all.
        temperature: of the shares; orders are those of the logits.
    """

    def __init__(self, size: int, dtype: torch.dtype, top_p: float | None, top_k: int | None, temperature: float = 1.0):
        self.size, self.top_p, self.scale = size, top_p, LOG2_E / temperature
        self.top_k = None if top_k is None or top_k >= size else top_k
        self.cut: float | None = None
        """A share above which all shares of the nucleus are, and no others; None where shares do not tell."""
        self.weights, self.some = torch.full((2, -(-size // LANES) * LANES), -torch.inf, dtype=dtype)

    def of(self, row: Tensor, weigh: bool = False) -> tuple[float, int]:
        """The least of logits [V] that is kept, and the last token with just that logit that is: V - 1 where all are.
        Everything is kept where a logit is no number or none is finite. weigh: leave the shares in `weights`."""
        least, last = -math.inf, self.size - 1
        self.cut = None
        if weigh or self.top_p is not None:
            self._weigh(row)
        if self.top_p is not None:
            least, last = self._nucleus(row, self.top_p)
        if self.top_k is not None and (best := kth_best(row, self.top_k)) > least:
            least, last, self.cut = best, self.size - 1, None
        return least, last

    def sums(self, row: Tensor, least: float, last: int, out: Tensor) -> None:
        """Sum the weights of what is kept by segments, in `out` [S]."""
        if self.cut is not None:
            torch.threshold(self.weights, self.cut, 0.0, out=self.some)
        else:
            np.multiply(self.weights[: self.size].numpy(), row.numpy() >= least, out=self.some[: self.size].numpy())
            self.some[last + 1 : self.size].masked_fill_(row[last + 1 :] == least, 0)
        torch.sum(self.some.view(-1, SEGMENT), -1, out=out)

    def _weigh(self, row: Tensor) -> None:
        powers = torch.sub(row, row.amax(), out=self.some[: self.size]).mul_(self.scale)
        torch.threshold_(powers, FLOOR * LOG2_E, -torch.inf)
        self.some[self.size :] = -torch.inf
        torch.exp2(self.some, out=self.weights)
        self.some[self.size :] = 0

    def _nucleus(self, row: Tensor, top_p: float) -> tuple[float, int]:
        limit = top_p * float(self.weights.view(-1, SEGMENT).sum(-1).sum(dtype=torch.float64))
        if not math.isfinite(limit):
            return -math.inf, self.size - 1
        high, low, before = self._bracket(limit, top_p)
        weights = self.weights[: self.size].numpy()
        between = np.flatnonzero((weights <= high) & (weights > low))
        logits = row.numpy()[between]
        # sorted alike: a larger logit has no smaller share
        inside, shares = np.sort(logits)[::-1], np.sort(weights[between])[::-1].astype(np.float64)
        kept = max(int((before + shares.cumsum() - shares <= limit).sum()), 1)
        least = inside[kept - 1]
        following = shares[kept] if kept < len(shares) else low
        self.cut = float(following) if following < shares[kept - 1] else None
        if kept == len(inside) or inside[kept] < least:
            return float(least), self.size - 1
        return float(least), int(between[logits == least][kept - 1 - int((inside > least).sum())])

    def _bracket(self, limit: float, top_p: float) -> tuple[float, float, float]:
        """Two weights between which the nucleus ends, the first included, and the sum of the weights above it."""
        sampled = np.sort(self.weights[: self.size : SAMPLED].numpy())
        sums = sampled.cumsum(dtype=np.float64)
        middle = int(np.searchsorted(sums, (1 - top_p) * sums[-1]))
        spread = 4 * math.isqrt(len(sampled) - middle) + 8
        guesses = [float(sampled[min(middle + spread, len(sampled) - 1)]), float(sampled[max(middle - spread, 0)])]
        # tokens of less than their part of what is left over are out
        high, low, before = 1.0, (limit / top_p - limit) / self.size * 0.999, 0.0
        while True:
            inside = sampled[np.searchsorted(sampled, low, "right") : np.searchsorted(sampled, high, "left")]
            if len(inside) <= FEW:
                return high, low, before
            pivot = guesses.pop() if guesses else float(inside[len(inside) // 2])
            if low < pivot < high:
                above = self._above(pivot)
                high, low, before = (high, pivot, before) if above > limit else (pivot, low, above)

    def _above(self, pivot: float) -> float:
        """The sum of the weights above `pivot`."""
        torch.threshold(self.weights, pivot, 0.0, out=self.some)
        return float(self.some.view(-1, SEGMENT).sum(-1).sum(dtype=torch.float64))
