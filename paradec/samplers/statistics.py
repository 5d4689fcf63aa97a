"""Numbers read from logits: probability of the best token, margin, entropy; filters of the sampling distribution.

In float64, as the public references of the threshold rules have it: trained models are so sure of many positions that
float32 probabilities tie at 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

QUANTITIES = ("confidence", "margin", "negative_entropy")
CHUNK = 2**25
"""Logits turned to float64 at a time: 256 MB."""


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
        p(1st) - p(2nd), "negative_entropy" sum p ln(p + 1e-10) (Dream's form; higher is surer). All are NaN where a
        logit is NaN or +inf.
    """
    rows = max(1, CHUNK // logits.shape[-1])
    shape = logits.shape[:-1]
    if shape.numel() <= rows:
        return _statistics(logits, reads, tokens)
    given = [None] * -(-shape.numel() // rows) if tokens is None else tokens.reshape(-1).split(rows)
    chunks = logits.reshape(-1, logits.shape[-1]).split(rows)
    parts = [_statistics(chunk, reads, chosen) for chunk, chosen in zip(chunks, given, strict=True)]
    found = {name: torch.cat([part[1][name] for part in parts]).view(shape) for name in parts[0][1]}
    return torch.cat([part[0] for part in parts]).view(shape), found


def _statistics(logits: Tensor, reads: tuple[str, ...], tokens: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    p = logits.softmax(dim=-1, dtype=torch.float64)
    found: dict[str, Tensor] = {}
    if tokens is None:
        best, tokens = p.max(dim=-1)
    else:
        best = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if "confidence" in reads:
        found["confidence"] = best
    if "margin" in reads:
        first, second = p.topk(2, dim=-1).values.unbind(-1)
        found["margin"] = first - second
    if "negative_entropy" in reads:
        found["negative_entropy"] = (p * (p + 1e-10).log()).sum(-1)
    return tokens, found


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
        if (count == 1).all():  # one token a step needs no sort
            return best_one(scores) & (scores > -torch.inf)
        count = torch.as_tensor(count, device=scores.device)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    return torch.zeros_like(within).scatter(-1, order, within) & (scores > -torch.inf)


def best_one(scores: Tensor) -> Tensor:
    """The highest score of each row [R, W] (the lowest index on ties), as a [R, W] bool mask."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.argmax(-1, keepdim=True), True)
