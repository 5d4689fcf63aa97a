"""Classifier-free guidance of a call's logits."""

from __future__ import annotations

import torch
from torch import Tensor


def guided(logits: Tensor, scale: float | Tensor) -> Tensor:
    """uncond + s (cond - uncond) of a call's logits [2N, W, V], whose first half is conditional: [N, W, V].

    It is float32 at least, for scaled logits can leave the range of float16. scale: s, a number or [N, 1, 1].

    The guided distribution is proportional to p_cond^s p_uncond^(1 - s). Where a branch excludes a token (-inf), that
    distribution's limit is taken: what both exclude stays excluded; so does what the conditional branch alone excludes,
    at s > 0; what the unconditional branch alone excludes is excluded at s < 1, keeps its conditional logit at 1, and
    above 1 it and its like take all the mass, in proportion to p_cond^s. NaN and +inf of either branch stay NaN or
    +inf.
    """
    conditional, unconditional = logits.to(torch.promote_types(logits.dtype, torch.float32)).chunk(2)
    mixed = conditional - unconditional
    # in place, since a large tensor more costs as much as the sum; scales of their own may be of a wider type
    mixed = scale * mixed + unconditional if isinstance(scale, Tensor) else mixed.mul_(scale).add_(unconditional)
    if mixed.is_cpu and not mixed.sum().isnan():  # elsewhere a look would wait for the device
        return mixed
    out, gone = conditional == -torch.inf, unconditional == -torch.inf
    sole = gone & ~out & (scale > 1)
    mixed = torch.where(gone, scale * conditional, mixed)
    lost = sole.any(-1, keepdim=True) & ~gone & (mixed < torch.inf)  # False where it is NaN
    lost |= out & (unconditional < torch.inf) & (scale > 0)
    lost |= gone & (conditional < torch.inf) & (scale < 1)
    mixed = mixed.masked_fill(lost, -torch.inf)
    # at 0 what the conditional branch says does not matter
    return torch.where(out & (scale == 0), unconditional, mixed) if isinstance(scale, Tensor) or not scale else mixed
