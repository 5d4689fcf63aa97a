"""Operations on logits and distributions [..., V] that methods share: temperatures, logarithms, sorting."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import recycled

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


def argmax(values: Tensor) -> Tensor:
    """Where the largest of values [..., N] is, [...] int64, the first on ties. Float32 or float64: on the CPU numpy's
    search is again an order of magnitude faster."""
    return torch.as_tensor(values.detach().numpy().argmax(-1)) if values.is_cpu else values.argmax(-1)


def one_hot_on_best(logits: Tensor) -> Tensor:
    """Distributions [..., V] that are 1 at the best of logits [..., V], float32 or float64; NaN where that is no finite
    number."""
    best = argmax(logits).unsqueeze(-1)
    single = logits.is_cpu and logits.dtype == torch.float32
    found = recycled(logits.shape).zero_() if single else torch.zeros_like(logits)
    found.scatter_(-1, best, 1)
    healthy = logits.gather(-1, best).isfinite()
    if logits.is_cpu and healthy.all():  # a pass that nobody waits for
        return found
    return found.masked_fill_(~healthy, torch.nan)
