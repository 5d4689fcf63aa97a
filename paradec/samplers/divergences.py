"""How far distributions moved since the step before: KL divergences, for thresholds."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paradec.kernels.token_stats import UNIT, TokenStats, padded, recycled, stats_where
from paradec.samplers import distributions

TINY = 1e-12
LEAST = -40.2
"""Beside the best token's, the logarithm of what is nothing beside `TINY`."""
ROUNDED = 1e-5
"""By how much divergences from logarithms in float32 may be rounded."""


def divergence(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(logits) [..., V] in float32, and KL(p || previous) [...] in nats, with 1e-12 added to both within
    the logarithm: tokens that `previous` excludes count finitely."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
    pairs = zip(distributions.chunks(p), distributions.chunks(previous), strict=True)
    kl = [torch.linalg.vecdot(now, ((now + TINY) / (before + TINY)).log_()) for now, before in pairs]
    return p, torch.cat(kl).view(p.shape[:-1])


class Moved(NamedTuple):
    """What `moved` finds. `N` chosen rows."""

    stats: TokenStats
    """Fields [N]: `token` and `prob`."""
    kept: Tensor
    """[..., V] float32: exponents of `POWER`, as they are to be given at the next step."""
    total: Tensor
    """[...] float64: the exponent of what they sum up to; infinite where nothing is kept."""
    kl: Tensor
    """[...] in nats, to be compared with the threshold alone; 0 where nothing was chosen."""


def moved(logits: Tensor, chosen: Tensor, previous: Tensor, total: Tensor, threshold: float) -> Moved:
    """Token statistics, and the KL divergence from the last step, as `divergence` has it, for what is compared with a
    threshold alone: from one read of the logits, without a logarithm per token. For large vocabularies on the CPU.

    Where the divergence is near the threshold it is the formula's own; else it is so far away that `LEAST` in the place
    of the logarithm of p + 1e-12 makes no difference.

    Args:
        logits: [..., V] of any float dtype. chosen: [...] bool; other rows keep what they have.
        previous, total: `kept` and `total` of the last step. An infinite total is no step, as if no token had been
            likely.
    """
    size = logits.shape[-1]
    flat, before = logits.reshape(-1, size), previous.reshape(-1, size)
    at, told = chosen.flatten().nonzero().squeeze(-1), total.flatten()
    first_step = told[at].isinf()
    rows, begun = at.tolist(), first_step.logical_not().tolist()
    memory = recycled((len(flat), padded(size)))
    kept = memory[:, :size]
    own, last = memory.split(1), [before[row] if old else None for row, old in zip(rows, begun, strict=True)]
    reader = _Moving([own[row] for row in rows], last, size)
    stats = stats_where(logits, chosen, reader=reader)
    highest, sums = torch.tensor((reader.heights, reader.sums), dtype=torch.float64)
    kept[at, stats.token] = highest.float()
    for row in set(range(len(flat))).difference(rows):
        kept[row] = before[row]
    # what is left of the best token's own share, in the units of `share`
    now = highest - UNIT * stats.prob.log()
    change = sums * (-highest / UNIT).exp() + highest - before[at, stats.token]
    kl = (change * stats.prob + told[at] - now) / UNIT
    kl[first_step] = torch.inf
    near = (kl > threshold / 4 - ROUNDED) & (kl < 32 * threshold + ROUNDED)
    if threshold > -math.log(TINY) - math.log(logits.shape[-1]):  # else nothing is stable at first
        near |= first_step
    for index in near.nonzero().flatten().tolist():
        row = rows[index]
        q = torch.zeros_like(before[row]) if not begun[index] else share_of(before[row], told[row])
        kl[index] = divergence(flat[row : row + 1], q.unsqueeze(0))[1]
    shape = chosen.shape
    found = told.index_copy(0, at, now).view(shape), torch.zeros(len(told)).index_copy(0, at, kl.float()).view(shape)
    return Moved(stats, kept.view(previous.shape), *found)


def share_of(kept: Tensor, total: Tensor) -> Tensor:
    """The distribution [V] of a row of `Moved.kept`, in float32."""
    return ((kept.double() - total) / UNIT).exp_().float()


class _Moving:
    """Adds up how far rows have moved, for `moved`.

    Args:
        memory: [1, padded(V)] of each row. last: [V], what the last step left there, of each row; None where there was
            none.
    """

    def __init__(self, memory: list[Tensor], last: list[Tensor | None], size: int):
        self._memory, self._last, self._size = iter(memory), iter(last), size
        self.heights: list[float] = []
        self.sums: list[float] = []
        """Of the shares, times how far each exponent is above that of the last step."""

    def memory(self) -> Tensor:
        self._now = next(self._memory)
        return self._now

    def read(self, share: Tensor, height: float) -> None:
        now, last = self._now[0, : self._size].clamp_(min=LEAST * UNIT + height), next(self._last)
        self.heights.append(height)
        self.sums.append(0.0 if last is None else float(share.dot(now)) - float(share.dot(last)))
