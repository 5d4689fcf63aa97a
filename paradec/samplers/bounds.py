"""Bounds of what top-p and top-k keep of a row, without a sort of the vocabulary. On the CPU, in float32 or float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats.portable import FLOOR
from paradec.samplers.distributions import tempered

FEW = 2**8
"""Shares that are sorted."""


def shares_of(row: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(row / temperature) [V], without underflow: shares below exp(FLOOR) of the largest take long to compute,
    and count as exp(FLOOR)."""
    return tempered(row, temperature).clamp_(min=FLOOR).softmax(-1)


def kept_bound(row: Tensor, shares: Tensor | None, top_p: float | None, top_k: int | None) -> tuple[float, int]:
    """The least of logits `row` [V] that is kept, and the last token with just that logit that is kept: V - 1 where all
    of them are. All tokens are kept where a logit is NaN or +inf, or none is finite.

    A nucleus holds a token if the shares [V] of all better ones add up to at most `top_p`, in float64. Of the nucleus,
    `top_k` keeps the best tokens and those that equal the last of them.

    Args:
        shares: `shares_of` the row; not read without `top_p`.
        top_p: below 1; None keeps all. top_k: None keeps all.
    """
    least, last = -math.inf, len(row) - 1
    if top_p is not None and shares is not None:
        least, last = _nucleus_bound(row.numpy(), shares.numpy(), top_p)
    if top_k is not None and top_k < len(row) and (kth := float(row.topk(top_k).values[-1])) > least:
        least, last = kth, len(row) - 1
    return least, last


def _nucleus_bound(values: np.ndarray, shares: np.ndarray, top_p: float) -> tuple[float, int]:
    total = float(torch.from_numpy(shares).sum(dtype=torch.float64))
    limit, size = top_p * total, len(values)
    if not limit < total:  # NaN, or a mass that rounding takes for all of it
        return -math.inf, size - 1
    # the first token outside has a share from `low` to `high`; `before` is the sum of all shares above `high`
    # all tokens of at most `low` together are less than what is left over
    low, high, before = (total - limit) / size * 0.999, float(shares.max()), 0.0
    inside = shares[shares > low]
    while len(inside) > FEW and high > low * (1 + 1e-7):
        pivot = math.sqrt(low * high)
        above = inside > pivot
        mass = float(inside[above].sum(dtype=np.float64))
        if before + mass > limit or above.all():
            inside, low = inside[above], pivot
        else:
            inside, high, before = inside[~above], pivot, before + mass
    inside = np.sort(inside)[::-1].astype(np.float64)
    kept = max(int((before + inside.cumsum() - inside <= limit).sum()), 1)
    # of equal shares, those of larger logits are first, and of equal logits the first tokens
    tied = np.flatnonzero(shares == inside[kept - 1])
    tied = tied[np.argsort(-values[tied], kind="stable")]
    count = int((inside[:kept] == inside[kept - 1]).sum())
    least = values[tied[count - 1]]
    cuts_ties = count < len(tied) and values[tied[count]] == least
    return float(least), int(tied[count - 1]) if cuts_ties else size - 1
