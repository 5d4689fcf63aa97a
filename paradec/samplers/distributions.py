"""Operations on logits and distributions [..., V] that methods share: temperatures, logarithms, sorting."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import argmax

CHUNK = 2**25
"""Logits of an accelerator held in float32 at a time: 128 MB."""
CPU_CHUNK = 2**19
"""The same on the CPU: what stays in its caches is twice as fast."""


def tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits [..., V] less the largest of their row, over a temperature (a number, or broadcastable): no finite row
    overflows, however low the temperature. Softmax is that of logits / temperature. Rows of -inf alone are NaN, and so
    is what is +inf or NaN."""
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def log_of(p: Tensor) -> Tensor:
    """ln of distributions [..., V], -inf where a probability is 0 or no normal number of its type: a processor's
    logarithm takes ten times as long over these."""
    least = torch.finfo(p.dtype).tiny
    return torch.threshold_(p.clamp(min=least).log_(), math.log(2 * least), -torch.inf)


def divided(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature [..., V] to the bit, as public codes have them; `tempered` in rows where that overflows."""
    top = logits.amax(-1, keepdim=True)
    beyond = (top / temperature).isinf() & top.isfinite()
    return (logits - top.where(beyond, 0)).div_(temperature)


def chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """[..., V] as pieces [n, V] of a bounded size."""
    rows = max(1, (CPU_CHUNK if logits.is_cpu else CHUNK) // logits.shape[-1])
    return logits.reshape(-1, logits.shape[-1]).split(rows)


def ascending(values: Tensor) -> Tensor:
    """Values [..., N] in ascending order. On the CPU by numpy, which sorts values an order of magnitude faster than
    torch sorts values and places."""
    return torch.from_numpy(np.sort(values.numpy())) if values.is_cpu else values.sort(-1).values


def divergence(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(logits) [..., V] in float32, and KL(p || previous) [...] in nats, with 1e-12 added to both within
    the logarithm: tokens that `previous` excludes count finitely."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
    pairs = zip(chunks(p), chunks(previous), strict=True)
    kl = [torch.linalg.vecdot(now, (now + 1e-12).div_(before + 1e-12).log_()) for now, before in pairs]
    return p, torch.cat(kl).view(p.shape[:-1])


def one_hot_on_best(logits: Tensor) -> Tensor:
    """Distributions [..., V] that are 1 at the best of logits [..., V], float32 or float64; NaN where that is no finite
    number."""
    best = argmax(logits).unsqueeze(-1)
    finite = logits.gather(-1, best).isfinite()
    one_hot = torch.zeros_like(logits).scatter_(-1, best, 1)
    if logits.is_cpu and finite.all():  # saves a pass; on an accelerator it would wait
        return one_hot
    return one_hot.masked_fill_(~finite, torch.nan)
