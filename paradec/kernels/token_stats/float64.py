"""The path "float64", which serves small vocabularies, in few passes: these are most of a small model's step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paradec.kernels.token_stats.draws import draw
from paradec.kernels.token_stats.reference import EPSILON, TokenStats

CPU_BLOCK = 2**17
"""Numbers in a block of "float64" on the CPU, if a row is no longer: 1 MB."""
BLOCK = 2**25
"""Numbers in a block on accelerators."""


def float64_stats(logits: Tensor, wanted: frozenset[str], temperature: float) -> TokenStats:
    """Statistics of logits [..., V]; no samples, and no probabilities of given tokens. Arguments as in `token_stats`,
    unchecked."""
    parts = [_row_stats(rows, wanted, temperature) for rows in row_blocks(logits, CPU_BLOCK)]
    return TokenStats(*concatenate(parts, logits.shape[:-1]))


def float64_samples(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draw a token from each of the rows [..., V] with the numbers uniform [...], in float64: [...]."""
    samples, start, uniform = [], 0, uniform.flatten()
    for rows in row_blocks(logits, CPU_BLOCK):
        wide = rows.to(torch.float64, copy=True).sub_(rows.amax(-1, keepdim=True)).div_(temperature)
        samples.append(draw(wide.softmax(-1), uniform[start : start + len(rows)]))
        start += len(rows)
    return torch.cat(samples).view(logits.shape[:-1])


def row_blocks(logits: Tensor, on_cpu: int) -> Iterator[Tensor]:
    """[..., V] as views [n, V] in order, of `on_cpu` numbers on the CPU and `BLOCK` elsewhere, or of one row; at least
    one view."""
    if logits.dim() <= 2 or logits.is_contiguous() or not logits.numel():
        rows = max(1, (on_cpu if logits.is_cpu else BLOCK) // logits.shape[-1])
        yield from logits.reshape(-1, logits.shape[-1]).split(rows)
    else:
        for part in logits:
            yield from row_blocks(part, on_cpu)


def concatenate(parts: list[Any], lead: torch.Size) -> list[Any]:
    """Tuples of tensors [n, ...] or None, field by field as one tensor [*lead, ...]."""
    fields = (
        field[0] if len(field) == 1 or field[0] is None else torch.cat(field) for field in zip(*parts, strict=True)
    )
    return [None if field is None else field.view(lead + field.shape[1:]) for field in fields]


def argmax(values: Tensor) -> Tensor:
    """Index of the largest of values [..., N], [...] int64, the first on ties. Float32 or float64: on the CPU numpy's
    search takes a tenth of torch's time."""
    return torch.as_tensor(values.detach().numpy().argmax(-1)) if values.is_cpu else values.argmax(-1)


def _row_stats(logits: Tensor, wanted: frozenset[str], temperature: float) -> TokenStats:
    """Statistics of rows [n, V]."""
    if temperature != 1 or "entropy" in wanted or "smoothed_entropy" in wanted:
        wide = logits.to(torch.float64, copy=True)
        if temperature != 1:
            # differences stay finite, or become -inf, at every temperature
            wide.sub_(wide.amax(-1, keepdim=True)).div_(temperature)
        p = wide.softmax(-1)
    else:
        p = logits.softmax(-1, dtype=torch.float64)
    token = argmax(p)
    at = token.unsqueeze(-1)
    prob = p.gather(-1, at).squeeze(-1)
    second_prob = margin = entropy = smoothed = logsumexp = gap = nonfinite = None
    if "gap" in wanted:
        highest = logits.topk(min(2, logits.shape[-1]), dim=-1).values.double()
        gap = highest[..., 0] - highest[..., 1] if logits.shape[-1] > 1 else torch.full_like(prob, torch.inf)
    if "smoothed_entropy" in wanted:
        smoothed = -(p + EPSILON).log_().mul_(p).sum(-1)
    if not wanted.isdisjoint(("second_prob", "margin", "entropy", "logsumexp")):
        if "entropy" in wanted:
            # sum p (z - z_best) + ln p_best needs no logarithm per token; both terms are negative, so nothing cancels
            entropy = -wide.sub_(wide.gather(-1, at)).clamp_(min=torch.finfo(torch.float64).min).mul_(p).sum(-1)
        p.scatter_(-1, at, 0)
        if "entropy" in wanted or "logsumexp" in wanted:
            beyond = (p.sum(-1) / prob).log1p()  # -ln p_best
            entropy = None if entropy is None else entropy.add_(beyond)
        if "logsumexp" in wanted:
            logsumexp = logits.gather(-1, at).squeeze(-1).double() / temperature + beyond
        if "second_prob" in wanted or "margin" in wanted:
            second_prob = p.amax(-1)
            margin = prob - second_prob
    if "nonfinite" in wanted:
        nonfinite = prob.isnan()
    return TokenStats(token, prob, second_prob, margin, entropy, smoothed, logsumexp, gap, nonfinite)
