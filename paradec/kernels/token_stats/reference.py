"""`TokenStats` and the definition of each field in float64, the oracle of all paths."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paradec.kernels.token_stats.draws import TokenDraws

EPSILON = 1e-10
"""Added to probabilities in Dream's logarithm."""


class TokenStats(NamedTuple):
    """Results of `token_stats`, shaped [...] for logits [..., V]; unrequested fields may be None. Floats are float64.
    In rows where `nonfinite` is true, floats are NaN (`gap` may be inf) and tokens are undefined."""

    token: Tensor
    """int64: the likeliest token, the lowest id on ties."""
    prob: Tensor
    second_prob: Tensor | None = None
    """Probability of the second likeliest token; equal to `prob` on ties."""
    margin: Tensor | None = None
    """prob - second_prob."""
    entropy: Tensor | None = None
    """-sum p ln p, in nats."""
    smoothed_entropy: Tensor | None = None
    """-sum p ln(p + 1e-10), Dream's form."""
    logsumexp: Tensor | None = None
    """Log-sum-exp of logits / temperature."""
    gap: Tensor | None = None
    """Largest minus second largest logit, without temperature; inf for a single token."""
    nonfinite: Tensor | None = None
    """bool: a logit is NaN or +inf, or all are -inf."""
    ids_prob: Tensor | None = None
    """Probabilities of `ids`, in their shape."""
    sample: Tensor | None = None
    """int64: a token drawn from softmax(logits / draws.temperature)."""
    sample_prob: Tensor | None = None
    """Probability of `sample` under softmax(logits / temperature)."""


FIELDS = TokenStats._fields[:9]
"""Names for `fields`; `ids_prob`, `sample` and `sample_prob` come with `ids` and `draws`."""


def reference_stats(
    logits: Tensor, temperature: float = 1.0, ids: Tensor | None = None, draws: TokenDraws | None = None
) -> TokenStats:
    """All fields for logits [..., V]. Arguments as in `token_stats`, unchecked; u is the uniform number of a draw.

    - z = (logits - max logits) / temperature
    - p = exp(z) / sum exp(z)
    - entropy = -sum p ln p = ln sum exp(z) - sum p z
    - logsumexp = max logits / temperature + ln sum exp(z)
    - sample = the least k with p_0 + ... + p_k > u, at draws.temperature"""
    logits = logits.double()
    top, token = logits.max(-1, keepdim=True)
    z = (logits - top) / temperature  # at most 0: no temperature overflows
    nonfinite = z.isnan().any(-1)
    z = z.masked_fill(nonfinite.unsqueeze(-1), torch.nan)
    # leave out the best token's exp(0) = 1: added to the other terms, it would round their digits away
    others = z.exp().scatter(-1, token, 0).sum(-1)
    p = z.exp() / (1 + others.unsqueeze(-1))
    # a vocabulary of one token gets a second token of probability 0
    first, second = F.pad(p, (0, 1)).sort(-1, descending=True).values[..., :2].unbind(-1)
    highest, following = F.pad(logits, (0, 1), value=-torch.inf).sort(-1, descending=True).values[..., :2].unbind(-1)
    ids_prob = sample = sample_prob = None
    if ids is not None:
        ids_prob = p.gather(-1, ids.reshape(*p.shape[:-1], -1)).view(ids.shape)
    if draws is not None:
        total = ((logits - top) / draws.temperature).exp().cumsum(-1)
        beyond = total > draws.uniform().unsqueeze(-1) * total[..., -1:]
        sample = beyond.to(torch.uint8).argmax(-1)
        sample_prob = p.gather(-1, sample.unsqueeze(-1)).squeeze(-1)
    return TokenStats(
        token=token.squeeze(-1),
        prob=first,
        second_prob=second,
        margin=first - second,
        entropy=others.log1p() - torch.where(p == 0, 0, p * z).sum(-1),
        smoothed_entropy=-(p * (p + EPSILON).log()).sum(-1),
        logsumexp=(top.squeeze(-1) / temperature + others.log1p()).masked_fill(nonfinite, torch.nan),
        gap=(highest - following).masked_fill(nonfinite, torch.nan),
        nonfinite=nonfinite,
        ids_prob=ids_prob,
        sample=sample,
        sample_prob=sample_prob,
    )
