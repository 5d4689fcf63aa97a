"""How far distributions moved since the step before: KL divergences, for thresholds."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paradec.kernels.token_stats import UNIT, TokenStats, recycled, stats_where
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
    flat, before = logits.reshape(-1, logits.shape[-1]), previous.reshape(-1, logits.shape[-1])
    at, told = chosen.flatten().nonzero().squeeze(-1), total.flatten()
    kept, first_step = recycled(before.shape), told[at].isinf()
    rows, begun = at.tolist(), first_step.logical_not().tolist()
    sums, heights = torch.zeros((2, len(rows))), []
    own, last, products = kept.unbind(0), before.unbind(0), [each.unbind(0) for each in sums]

    def read(index: int, apart: Tensor, share: Tensor, height: float) -> None:
        row = rows[index]
        torch.clamp(apart, min=LEAST * UNIT + height, out=own[row])
        heights.append(height)
        if begun[index]:
            torch.dot(share, own[row], out=products[0][index])
            torch.dot(share, last[row], out=products[1][index])

    stats = stats_where(logits, chosen, each=read)
    highest = torch.tensor(heights, dtype=torch.float64)
    kept[at, stats.token] = highest.float()
    for row in set(range(len(own))).difference(rows):
        own[row].copy_(last[row])
    # what is left of the best token's own share, in the units of `share`
    now = highest - UNIT * stats.prob.log()
    change = (sums[0] - sums[1]).double() * (-highest / UNIT).exp() + highest - before[at, stats.token]
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
    return ((kept - total) / UNIT).exp_().float()
