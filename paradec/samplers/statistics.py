"""Numbers read from logits: probability of the best token, margin, entropy; filters of the sampling distribution.

In float64, as the public references of the threshold rules have it: trained models are so sure of many positions that
float32 probabilities tie at 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

QUANTITIES = ("confidence", "margin", "negative_entropy", "minus_entropy", "best_token", "logit_gap")
CHUNK = 2**25
"""Logits of an accelerator turned to float64 at a time: 256 MB."""
CPU_CHUNK = 2**19
"""The same on the CPU: what stays in its caches is twice as fast."""
TINY = 1e-12


def token_statistics(
    logits: Tensor, reads: tuple[str, ...], tokens: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Statistics of each position's distribution softmax(logits), in float64.

    Args:
        logits: [..., V] of any float dtype; -inf excludes a word.
        reads: which of `QUANTITIES` to compute.
        tokens: [...] int64: "confidence" is the probability of these; None takes the best token (lowest id on ties).

    Returns:
        The tokens [...] int64, and the quantities by name, each [...] float64: "confidence" p(token), "margin"
        p(1st) - p(2nd), "negative_entropy" sum p ln(p + 1e-10) (Dream's form; higher is surer), "minus_entropy"
        sum p ln p, "best_token" the likeliest token (int64), "logit_gap" z(1st) - z(2nd). All but the last two are NaN
        where a logit is NaN or +inf.
    """
    if logits.numel() <= CPU_CHUNK:
        return _statistics(logits, reads, tokens)
    shape, chunks = logits.shape[:-1], _chunks(logits)
    given = [None] * len(chunks) if tokens is None else tokens.reshape(-1).split(len(chunks[0]))
    parts = [_statistics(chunk, reads, chosen) for chunk, chosen in zip(chunks, given, strict=True)]
    found = {name: torch.cat([part[1][name] for part in parts]).view(shape) for name in parts[0][1]}
    return torch.cat([part[0] for part in parts]).view(shape), found


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """[..., V] as pieces [n, V] of which few enough entries are held in float64 at a time."""
    rows = max(1, (CPU_CHUNK if logits.is_cpu else CHUNK) // logits.shape[-1])
    return logits.reshape(-1, logits.shape[-1]).split(rows)


def _statistics(logits: Tensor, reads: tuple[str, ...], tokens: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    # what follows works in place where it can: these passes over the vocabulary are most of a step's cost
    if "minus_entropy" in reads or "negative_entropy" in reads:
        wide = logits.to(torch.float64, copy=True)
        p = wide.softmax(dim=-1)
    else:
        p = logits.softmax(dim=-1, dtype=torch.float64)
    found: dict[str, Tensor] = {}
    if tokens is None:
        best, first = p.max(dim=-1)
        tokens, confidence = first, best
    else:
        confidence = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if not {"margin", "minus_entropy", "best_token"}.isdisjoint(reads):
            best, first = p.max(dim=-1)
    if "confidence" in reads:
        found["confidence"] = confidence
    if "logit_gap" in reads:
        highest, second = logits.topk(2, dim=-1).values.double().unbind(-1)
        found["logit_gap"] = highest - second
    if "best_token" in reads:
        found["best_token"] = first
    if "negative_entropy" in reads:
        logarithm = (p + 1e-10).log_() if "minus_entropy" in reads else torch.add(p, 1e-10, out=wide).log_()
        found["negative_entropy"] = logarithm.mul_(p).sum(-1)
    if "margin" in reads or "minus_entropy" in reads:
        at = first.unsqueeze(-1)
        if "minus_entropy" in reads:
            # sum p (z - z_best) + ln p_best needs no logarithm per word; both terms are negative, so nothing cancels
            spread = wide.sub_(wide.gather(-1, at)).clamp_(min=torch.finfo(torch.float64).min).mul_(p).sum(-1)
        p.scatter_(-1, at, 0)
        if "minus_entropy" in reads:
            found["minus_entropy"] = spread - (p.sum(-1) / best).log1p()
        if "margin" in reads:
            found["margin"] = best - p.amax(-1)
    return tokens, found


def best_with_probability(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token [...] (int64) of logits [..., V], and its probability [...], in float32 at least: enough where it
    is not compared with a threshold, and cheap."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    best = [chunk.argmax(-1, keepdim=True) for chunk in _chunks(logits)]
    p = [chunk.softmax(-1, dtype=wide).gather(-1, at) for chunk, at in zip(_chunks(logits), best, strict=True)]
    return torch.cat(best).view(logits.shape[:-1]), torch.cat(p).view(logits.shape[:-1])


def divergence(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(logits) [..., V] in float32, and KL(p || previous) [...] in nats, with 1e-12 added to both within
    the logarithm: words that `previous` excludes count finitely."""
    p = logits.softmax(-1, dtype=torch.float32)
    pairs = zip(_chunks(p), _chunks(previous), strict=True)
    kl = [torch.linalg.vecdot(now, ((now + TINY) / (before + TINY)).log_()) for now, before in pairs]
    return p, torch.cat(kl).view(p.shape[:-1])


def filter_logits(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """Exclude (-inf) all but the nucleus of mass `top_p`, then all but the `top_k` best. logits: [..., V].

    Dream's order; the word that crosses `top_p` stays in, and so does the best one always.
    """
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before > top_p)
        logits = logits.masked_fill(out, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits


def top_by_rank(scores: Tensor, count: np.ndarray | Tensor) -> Tensor:
    """The `count` highest scores of each row; equal scores go to the lower index.

    Args:
        scores: [R, W], -inf where not eligible.
        count: [R] int64, on the host or the device.

    Returns:
        [R, W] bool; never an ineligible entry.
    """
    if isinstance(count, np.ndarray):
        if set(count.tolist()) == {1}:  # one token a step needs no sort
            at = scores.argmax(-1, keepdim=True)
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, at, scores.gather(-1, at) > -torch.inf)
        count = torch.as_tensor(count, device=scores.device)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    return torch.zeros_like(within).scatter(-1, order, within) & (scores > -torch.inf)


def best_one(scores: Tensor) -> Tensor:
    """The highest score of each row [R, W] (the lowest index on ties), as a [R, W] bool mask."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), True)
