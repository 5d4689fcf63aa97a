"""How far distributions moved since the step before: KL divergences, for thresholds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paradec.kernels.token_stats import scratch
from paradec.samplers import distributions

TINY = 1e-12
LEAST = -58.0
"""Logarithms to base 2 of what is nothing beside `TINY`."""
ROUNDED = 1e-5
"""By how much divergences from logarithms in float32 may be rounded."""


def divergence(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(logits) [..., V] in float32, and KL(p || previous) [...] in nats, with 1e-12 added to both within
    the logarithm: tokens that `previous` excludes count finitely."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
    pairs = zip(distributions.chunks(p), distributions.chunks(previous), strict=True)
    kl = [torch.linalg.vecdot(now, ((now + TINY) / (before + TINY)).log_()) for now, before in pairs]
    return p, torch.cat(kl).view(p.shape[:-1])


def log_divergence(
    logits: Tensor, total: Tensor, previous: Tensor, threshold: float, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """As `divergence`, for what is compared with a threshold alone, without a logarithm per token.

    Args:
        logits: [..., V] of any float dtype, on the CPU. total: [...], their logsumexp.
        previous: [..., V] float32: what this function gave before; 0 where there is none, as if no token
            had been likely.
        seen: [...] bool: the others keep what they have, at a divergence of 0.

    Returns:
        log2 softmax(logits) in float32, at least `LEAST`, and the divergence [...]: as the formula has it where it is
        near the threshold, else so far from it that `LEAST` in the place of log2(p + 1e-12) makes no difference.
    """
    flat, found = logits.reshape(-1, logits.shape[-1]), torch.empty_like(previous)
    before, after = previous.view(flat.shape), found.view(flat.shape)
    scale, kl = 1 / math.log(2), torch.zeros(len(flat))
    shift = (total.reshape(-1, 1) * -scale).float()
    rows = max(1, distributions.CPU_CHUNK // flat.shape[-1])
    memory = scratch((2, min(rows, len(flat)), flat.shape[-1]), flat.device)
    kept = seen.flatten().tolist()
    ends = [at for at in range(1, len(kept)) if kept[at] != kept[at - 1]]
    for first, stop in zip([0, *ends], [*ends, len(kept)], strict=True):
        for begin in range(first, stop, rows):
            here = slice(begin, min(begin + rows, stop))
            own, change = after[here], memory[0, : here.stop - begin]
            if not kept[begin]:
                own.copy_(before[here])
                continue
            torch.add(shift[here], flat[here].float(), alpha=scale, out=own).clamp_(min=LEAST)
            p = torch.exp2(own, out=memory[1, : here.stop - begin])
            kl[here] = torch.sub(own, before[here], out=change).mul_(p).sum(-1) / scale
    first_step = (before[:, :2] == 0).all(-1)
    near = (kl > threshold / 4 - ROUNDED) & (kl < 16 * threshold + ROUNDED) | first_step
    for at in (near & seen.flatten()).nonzero().flatten().tolist():
        q = torch.zeros_like(before[at]) if first_step[at] else before[at].exp2()
        kl[at] = divergence(flat[at : at + 1], q.unsqueeze(0))[1]
    return found, kl.view(seen.shape)
