"""Filters of the distribution that tokens are drawn from: the nucleus, the best tokens, those near the best one."""

from __future__ import annotations

import torch
from torch import Tensor

from paradec.kernels.token_stats import SMALL_VOCABULARY
from paradec.samplers.distributions import argmax, ascending, chunks, tempered

HEAD = 2**12
"""Tokens that a nucleus is looked for in before all others are."""


def filter_logits(logits: Tensor, top_p: float | None, top_k: int | None, top_n_sigma: float | None = None) -> Tensor:
    """Exclude (-inf) all but the nucleus of mass `top_p`, then all but the `top_k` best, then all but those within
    `top_n_sigma` standard deviations of the best (`near_the_best`). logits: [..., V].

    Dream's order; the token that crosses `top_p` stays in, and so does the best one always. Tokens as good as the
    `top_k`-th stay; which of equal tokens the nucleus ends with is left to `torch.sort`.
    """
    if top_n_sigma is not None:
        return near_the_best(filter_logits(logits, top_p, top_k), top_n_sigma)
    nucleus = top_p is not None and top_p < 1
    if not nucleus and (top_k is None or top_k >= logits.shape[-1]):
        return logits
    if not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64):
        return _filter_by_rank(logits, top_p, top_k)
    least, known = _least_kept(logits.detach(), top_p if nucleus else None, top_k)
    filtered = _without_less(logits.detach(), least)
    if not known.all():
        filtered[~known] = _filter_by_rank(logits[~known], top_p, top_k)
    return filtered


def filtered_distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """What a token is drawn from: logits [..., V] -> [..., V], float32 at least; one-hot on the best at temperature 0.
    NaN where no logit is finite.

    The order of LlamaGen's public code and its kin: the temperature, then top-k, then top-p of what is left. The token
    that crosses `top_p` stays.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        best = argmax(logits).unsqueeze(-1)
        one_hot = torch.zeros_like(logits).scatter_(-1, best, 1)
        return one_hot.masked_fill_(~logits.gather(-1, best).isfinite(), torch.nan)
    kept = filter_logits(tempered(logits, temperature), None, top_k)
    return filter_logits(kept, top_p, None).softmax(-1)


def near_the_best(logits: Tensor, count: float) -> Tensor:
    """Exclude (-inf) logits [..., V] that are more than `count` standard deviations below the best of their row.

    Tang et al., "Top-nsigma: Not All Logits Are You Need", arXiv 2411.07641. The deviation is that of the row's finite
    logits about their mean (divisor N), in float64. Neither an offset nor a temperature changes what is kept. What
    Lumina-mGPT 2.0 computes where logits are excluded already is their root mean square about zero, which an offset
    changes. Rows with NaN or +inf stay as they are.
    """
    return torch.cat([_near_the_best(rows, count) for rows in chunks(logits)]).view(logits.shape)


def _near_the_best(logits: Tensor, count: float) -> Tensor:
    """The same of [n, V]."""
    finite = logits.isfinite()
    below = logits.double() - logits.amax(-1, keepdim=True)
    known = below.where(finite, 0)
    number = finite.sum(-1, keepdim=True).clamp(min=1)
    # as shares of the widest distance: squares stay in range
    widest = known.amin(-1, keepdim=True).neg().clamp(min=torch.finfo(torch.float64).tiny)
    share = known / widest
    spread = (share - share.sum(-1, keepdim=True) / number).where(finite, 0)
    sigma = (spread.square().sum(-1, keepdim=True) / number).sqrt() * widest
    return logits.masked_fill(below < -count * sigma, -torch.inf)


def _filter_by_rank(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """`filter_logits` token by token."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        out = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p > top_p)
        logits = logits.masked_fill(out, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits


def _least_kept(logits: Tensor, top_p: float | None, top_k: int | None) -> tuple[Tensor, Tensor]:
    """The least logit [...] that `filter_logits` keeps, and whether that says it all [...]: not where it keeps some of
    several equal tokens. On the CPU."""
    if len(parts := chunks(logits)) > 1:
        found = zip(*(_least_kept(rows, top_p, top_k) for rows in parts), strict=True)
        least, known = (torch.cat(each).view(logits.shape[:-1]) for each in found)
        return least, known
    size = logits.shape[-1]
    top_k = size if top_k is None else min(top_k, size)
    if top_p is None:
        # numpy's search takes ten times as long over rows that are mostly -inf; from the other end it does not
        negated = -logits.numpy()
        negated.partition(top_k - 1)
        kth = torch.from_numpy(negated)[..., top_k - 1].neg()
        return kth, torch.ones_like(kth, dtype=torch.bool)
    ordered = ascending(logits).flip(-1)
    p = ordered.softmax(-1)[..., :top_k]
    # from some token on all are out: sums grow, shares fall, and rounding keeps their order
    part = p[..., :HEAD]
    out = part.cumsum(-1) - part > top_p
    if top_k > HEAD and not out[..., -1].all():
        part = p
        out = part.cumsum(-1) - part > top_p
    kept = part.shape[-1] - out.sum(-1, keepdim=True)
    least, following = ordered.gather(-1, kept - 1), ordered.gather(-1, kept.clamp(max=size - 1))
    known = (least > following) | (kept == size) | (least == -torch.inf)
    return least.squeeze(-1), known.squeeze(-1)


def _without_less(logits: Tensor, least: Tensor) -> Tensor:
    """Logits [..., V] with -inf for what is less than `least` [...]. On the CPU."""
    size = logits.shape[-1]
    if size <= SMALL_VOCABULARY:
        return torch.where(logits < least.unsqueeze(-1), -torch.inf, logits)
    filtered = torch.empty(logits.shape, dtype=logits.dtype)
    # row by row with one number each: a comparison with a tensor takes six times as long
    bounds = least.nextafter(torch.full_like(least, -torch.inf)).flatten().tolist()
    for row, out, bound in zip(logits.reshape(-1, size), filtered.view(-1, size), bounds, strict=True):
        torch.threshold(row, bound, -torch.inf, out=out)
    return filtered
