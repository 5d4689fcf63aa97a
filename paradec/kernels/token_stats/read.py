"""Which path serves which logits, and the "float64" path itself, which serves small vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor

from paradec.kernels import has_triton
from paradec.kernels.token_stats.draws import TokenDraws
from paradec.kernels.token_stats.portable import CHUNK, chunked_stats, in_pieces, samples, with_sample
from paradec.kernels.token_stats.reference import EPSILON, FIELDS, TokenStats

SMALL_VOCABULARY = 2**13
"""Up to so many tokens "float64" serves all logits: little beside any forward."""
IN_ONE_READ = frozenset(FIELDS) - {"smoothed_entropy"}
"""What the kernel finds: a logarithm of p + 1e-10 takes the normalized p, and so a second read."""
FLOAT64_CPU_CHUNK = 2**17
"""Numbers that "float64" holds at a time on the CPU, if a row is no longer: 1 MB."""
LONG = 2**11
"""Tokens from which on "float64" looks among stretches first."""


def read_stats(
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: TokenDraws | None = None,
    path: str | None = None,
) -> TokenStats:
    """`token_stats` without its checks, for callers at every step."""
    if path is None:
        path = path_for(logits, wanted)
    if path == "triton":
        # here alone: `import paradec` stays without triton
        from paradec.kernels.token_stats.triton import triton_stats

        return triton_stats(logits, wanted, temperature, ids, draws)
    if path == "chunked":
        return chunked_stats(logits, wanted, temperature, ids, draws)
    logits = logits.detach()
    if draws is not None:
        sample = samples(logits, draws.uniform(), draws.temperature)
        return with_sample(lambda asked: read_stats(logits, wanted, temperature, asked, None, path), sample, ids)
    if logits.numel() <= (FLOAT64_CPU_CHUNK if logits.is_cpu else CHUNK):
        return _float64_stats(logits, wanted, temperature, ids)
    return in_pieces(_float64_stats, FLOAT64_CPU_CHUNK, logits, wanted, temperature, ids)


def path_for(logits: Tensor, fields: frozenset[str] = IN_ONE_READ) -> str:
    """The path that serves these logits: it depends on dtype, vocabulary and device, never on how many rows there
    are."""
    if logits.dtype == torch.float64 or logits.shape[-1] <= SMALL_VOCABULARY:
        return "float64"
    return "triton" if logits.is_cuda and fields <= IN_ONE_READ and has_triton() else "chunked"


def _float64_stats(
    logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None, scratch: Tensor | None = None
) -> TokenStats:
    """In float64 and few passes, all at once in memory. scratch: two tensors of the logits' shape, overwritten; None
    makes them."""
    # what follows works in place where it can: these passes over the vocabulary are most of a small model's step
    probabilities, wide = (None, None) if scratch is None else scratch.unbind(0)
    if wide is not None or temperature != 1 or "entropy" in wanted or "smoothed_entropy" in wanted:
        wide = logits.to(torch.float64, copy=True) if wide is None else wide.copy_(logits)
        if temperature != 1:
            # what is divided are differences, which stay finite, or -inf, at every temperature
            wide.sub_(wide.amax(-1, keepdim=True)).div_(temperature)
        p = torch.softmax(wide, -1, out=probabilities)
    else:
        p = torch.softmax(logits, -1, dtype=torch.float64)
    best, first = _best(p)
    if not wanted and ids is None:
        return TokenStats(first, best)
    ids_prob = second = margin = entropy = smoothed = gap = logsumexp = nonfinite = None
    if ids is not None:
        ids_prob = p.gather(-1, ids) if ids.dim() == p.dim() else p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if "gap" in wanted:
        highest = logits.topk(min(2, logits.shape[-1]), dim=-1).values.double()
        gap = highest[..., 0] - highest[..., 1] if logits.shape[-1] > 1 else torch.full_like(best, torch.inf)
    if "smoothed_entropy" in wanted:
        # `wide` is free to be overwritten where the other entropy does not need it
        logarithm = (p + EPSILON).log_() if "entropy" in wanted else torch.add(p, EPSILON, out=wide).log_()
        smoothed = -logarithm.mul_(p).sum(-1)
    if not wanted.isdisjoint(("second_prob", "margin", "entropy", "logsumexp")):
        at = first.unsqueeze(-1)
        if "entropy" in wanted:
            # sum p (z - z_best) + ln p_best needs no logarithm per token; both terms are negative, so nothing cancels
            assert wide is not None
            spread = wide.sub_(wide.gather(-1, at)).clamp_(min=torch.finfo(torch.float64).min).mul_(p).sum(-1)
        p.scatter_(-1, at, 0)
        if "entropy" in wanted or "logsumexp" in wanted:
            beyond = (p.sum(-1) / best).log1p()  # -ln p_best
        if "entropy" in wanted:
            entropy = beyond - spread
        if "logsumexp" in wanted:
            logsumexp = logits.gather(-1, at).squeeze(-1).double() / temperature + beyond
        if "second_prob" in wanted or "margin" in wanted:
            second = p.amax(-1)
            margin = best - second
    if "nonfinite" in wanted:
        nonfinite = best.isnan()
    return TokenStats(first, best, second, margin, entropy, smoothed, logsumexp, gap, nonfinite, ids_prob)


def _best(source: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of [..., V] and where it is, [...] each; the lowest index on ties. A search that remembers
    indices takes ten times as long as one that does not, which long rows repay."""
    size = next((size for size in (128, 64) if source.shape[-1] % size == 0), 0)
    if source.shape[-1] < LONG or not size:
        return source.max(-1)
    top, stretch = source.unflatten(-1, (-1, size)).amax(-1).max(-1, keepdim=True)
    inside = source.gather(-1, stretch * size + torch.arange(size, device=source.device))
    return top.squeeze(-1), inside.argmax(-1).add_(stretch.squeeze(-1), alpha=size)
