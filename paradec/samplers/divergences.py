"""How far distributions moved since the step before: KL divergences, for thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import TokenStats, padded, portable, recycled, stats_where
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
    """[..., V] float32: exponents of `portable.exponential`, as they are to be given at the next step."""
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
    flat, before, told = logits.reshape(-1, size), previous.reshape(-1, size), total.numpy().ravel()
    seen = chosen.numpy().ravel()
    at = np.flatnonzero(seen)
    first_step = np.isinf(told[at])
    memory = recycled((len(flat), padded(size)))
    memory[:, size:].fill_(portable.exponential.floor)
    kept = memory[:, :size]
    old = before.unbind()
    own = list(zip(memory.unbind(), kept.split(1), strict=True))
    reader = _Moving([(*own[row], None if first else old[row]) for row, first in zip(at, first_step, strict=True)])
    stats = stats_where(logits, chosen, reader=reader)
    highest, sums, best = np.array(reader.heights), np.array(reader.sums), stats.token.numpy()
    kept.numpy()[at, best] = highest
    for row in np.flatnonzero(~seen):
        kept[row] = old[row]
    prob = stats.prob.numpy()
    # what is left of the best token's own share, in the units of `share`
    with np.errstate(invalid="ignore"):  # of logits that are not finite, which the commit refuses
        now = highest - portable.exponential.unit * np.log(prob)
        change = sums * np.exp(-highest / portable.exponential.unit) + highest - before.numpy()[at, best]
        moves = np.where(first_step, np.inf, (change * prob + told[at] - now) / portable.exponential.unit)
    near = (moves > threshold / 4 - ROUNDED) & (moves < 32 * threshold + ROUNDED)
    if threshold > -math.log(TINY) - math.log(size):  # else nothing is stable at first
        near |= first_step
    for index in np.flatnonzero(near):
        row = at[index]
        q = torch.zeros_like(old[row]) if first_step[index] else share_of(old[row], told[row])
        moves[index] = divergence(flat[row : row + 1], q.unsqueeze(0))[1]
    totals, kl = told.copy(), np.zeros(len(told), np.float32)
    totals[at], kl[at] = now, moves
    found = (torch.from_numpy(each).view(chosen.shape) for each in (totals, kl))
    return Moved(stats, kept.view(previous.shape), *found)


def share_of(kept: Tensor, total: Tensor | float) -> Tensor:
    """The distribution [V] of a row of `Moved.kept`, in float32."""
    return ((kept.double() - total) / portable.exponential.unit).exp_().float()


class _Moving:
    """Adds up how far rows have moved, for `moved`.

    Args:
        rows: the `memory` of `RowReader`, and [V], what the last step left there; None where there was none.
    """

    def __init__(self, rows: list[tuple[Tensor, Tensor, Tensor | None]]):
        self.least = LEAST * portable.exponential.unit
        self.memory: Iterator[tuple[Tensor, Tensor]] = ((padded, row) for padded, row, _ in rows)
        self._rows = iter(rows)
        self.heights: list[float] = []
        self.sums: list[float] = []
        """Of the shares, times how far each exponent is above that of the last step."""

    def read(self, share: Tensor, height: float) -> None:
        _, (now,), last = next(self._rows)
        self.heights.append(height)
        self.sums.append(0.0 if last is None else float(share.dot(now)) - float(share.dot(last)))
