"""`TokenStats` and the definition of each field, in float64. Every path is held to `reference_stats`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paradec.kernels.token_stats.draws import TokenDraws

EPSILON = 1e-10
"""What Dream adds to probabilities within the logarithm."""


class TokenStats(NamedTuple):
    """What `token_stats` found. `[...]` are the logits' dimensions but the last; fields that were not asked for may be
    None. Floats are float64. Where a row is `nonfinite` its floats are NaN and its ids mean nothing."""

    token: Tensor
    """[...] int64: the likeliest token, the lowest id on ties."""
    prob: Tensor
    """[...]: its probability."""
    second_prob: Tensor | None = None
    """[...]: the probability of the second likeliest; that of `token` again where two tie."""
    margin: Tensor | None = None
    """[...]: prob - second_prob."""
    entropy: Tensor | None = None
    """[...]: -sum p ln p, in nats."""
    smoothed_entropy: Tensor | None = None
    """[...]: -sum p ln(p + 1e-10), Dream's form of it."""
    logsumexp: Tensor | None = None
    """[...]: of the logits over `temperature`."""
    gap: Tensor | None = None
    """[...]: the largest logit minus the second largest, at the logits' own scale; inf for one token only."""
    nonfinite: Tensor | None = None
    """[...] bool: a logit is NaN or +inf, or all are -inf."""
    ids_prob: Tensor | None = None
    """Shaped as `ids`: their probabilities."""
    sample: Tensor | None = None
    """[...] int64: a token drawn from softmax(logits / draws.temperature)."""
    sample_prob: Tensor | None = None
    """[...]: its probability, under the same distribution as `prob`."""


FIELDS = TokenStats._fields[:9]
"""What `fields` may name; `ids_prob`, `sample` and `sample_prob` are there whenever `ids` and `draws` are."""


def reference_stats(
    logits: Tensor, temperature: float = 1.0, ids: Tensor | None = None, draws: TokenDraws | None = None
) -> TokenStats:
    """All fields of logits [..., V]. Arguments as in `token_stats`, unchecked.

    - z = (logits - max logits) / temperature
    - p = exp(z) / sum exp(z)
    - entropy = -sum p ln p = ln sum exp(z) - sum p z
    - logsumexp = max logits / temperature + ln sum exp(z)
    - sample = the least k with p_0 + ... + p_k > u, at draws.temperature
    """
    logits = logits.double()
    top, token = logits.max(-1, keepdim=True)
    z = (logits - top) / temperature  # at most 0: no temperature overflows
    nonfinite = z.isnan().any(-1)
    z = z.masked_fill(nonfinite.unsqueeze(-1), torch.nan)
    # 1 is the best token's; added to the others' it would take their digits
    others = z.exp().scatter(-1, token, 0).sum(-1)
    p = z.exp() / (1 + others.unsqueeze(-1))
    # beside the only token, one that is excluded
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
