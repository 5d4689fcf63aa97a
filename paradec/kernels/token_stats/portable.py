"""The "chunked" path: float32, in blocks of rows that fit into a processor's caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paradec.kernels.token_stats.draws import SEGMENT, TokenDraws, draw, locate
from paradec.kernels.token_stats.reference import EPSILON, TokenStats

CPU_BLOCK = 2**19
"""Numbers per block on the CPU: 2 MB in float32."""
BLOCK = 2**25
"""Numbers per block on accelerators."""
FLOOR = -72.0
"""Lower bound of (logit - second largest logit) / temperature. exp(FLOOR) is 2**-103, negligible in float64; without
the bound, subnormal exponentials would be ten times slower."""
MAX_LOG_WEIGHT = 700.0
"""Upper bound of the best token's log-weight, so that its weight stays finite in float64."""


class _RowSums(NamedTuple):
    """Sums over each of n rows, float64 [n] unless noted. A token's weight is exp((logit - second) / temperature).
    `second` is the second largest logit, so only negligible weights underflow in float32."""

    token: Tensor
    """int64: the best token."""
    top: Tensor
    second: Tensor
    """Second largest logit; -inf for a single token."""
    mass: Tensor
    """Sum of the weights of all tokens except the best."""
    moment: Tensor | None
    """Sum of weight * (logit - second) / temperature over the same tokens."""
    smoothed: Tensor | None
    """-sum p ln(p + EPSILON) over the same tokens."""
    segments: Tensor | None
    """[n, S]: sums of the weights of all tokens at the draws' temperature, by segments of `SEGMENT` tokens."""


def chunked_stats(
    logits: Tensor, fields: frozenset[str], temperature: float, draws: TokenDraws | None = None
) -> TokenStats:
    """Compute statistics of logits [..., V], and samples for `draws`, without checks and without `ids_prob`."""
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    blocks = list(row_blocks(logits, CPU_BLOCK))
    width = -(-vocab // SEGMENT) * SEGMENT
    dtype = torch.promote_types(logits.dtype, torch.float32)
    buffers = torch.empty((2, max(map(len, blocks)), width), dtype=dtype, device=logits.device)
    draw_temperature = None if draws is None else draws.temperature
    parts = [
        _sum_rows(rows, fields, temperature, draw_temperature, *buffers[:, : len(rows)].unbind()) for rows in blocks
    ]
    sums = _RowSums(*concatenate(parts, lead))
    stats = _from_sums(sums, fields, temperature)
    return stats if draws is None else stats._replace(sample=_sample(sums, logits, draws))


def row_blocks(logits: Tensor, cpu_block: int) -> Iterator[Tensor]:
    """Split [..., V] into views [n, V] of at most `cpu_block` numbers on the CPU, `BLOCK` elsewhere, but n >= 1."""
    if logits.dim() <= 2 or logits.is_contiguous() or not logits.numel():
        rows = max(1, (cpu_block if logits.is_cpu else BLOCK) // logits.shape[-1])
        yield from logits.reshape(-1, logits.shape[-1]).split(rows)
    else:
        for matrix in logits:
            yield from row_blocks(matrix, cpu_block)


def concatenate(tuples: list[Any], lead: torch.Size) -> list[Any]:
    """Concatenate tuples field by field: tensors [n, ...] become one tensor [*lead, ...]; None remains None."""
    fields = (
        field[0] if len(field) == 1 or field[0] is None else torch.cat(field) for field in zip(*tuples, strict=True)
    )
    return [None if field is None else field.view(lead + field.shape[1:]) for field in fields]


def argmax(values: Tensor) -> Tensor:
    """[...] int64: first index of the largest of values [..., N]. NumPy is ten times as fast on the CPU."""
    return torch.as_tensor(values.detach().numpy().argmax(-1)) if values.is_cpu else values.argmax(-1)


def _sum_rows(
    rows: Tensor,
    fields: frozenset[str],
    temperature: float,
    draw_temperature: float | None,
    differences: Tensor,
    weights: Tensor,
) -> _RowSums:
    """Sum over rows [n, V]. differences, weights: buffers [n, V rounded up to whole segments]."""
    vocab = rows.shape[1]

    def load() -> None:
        differences[:, :vocab].copy_(rows)
        differences[:, vocab:] = -torch.inf

    def by_segments(values: Tensor) -> Tensor:
        return values.unflatten(1, (-1, SEGMENT)).sum(-1)

    def weigh(temperature: float) -> tuple[Tensor, Tensor]:
        """Return softmax weights summed by segments, and the weight of difference 0, which the best token gets."""
        # subtract first: differences keep their digits and overflow to -inf only
        differences.sub_(base)
        if temperature != 1:
            differences.div_(temperature)
        differences.clamp_(min=FLOOR).scatter_(1, best_index, 0)
        torch.softmax(differences, -1, out=weights)
        return by_segments(weights), weights.gather(1, best_index).double()

    load()
    best_index = argmax(differences).unsqueeze(1)
    top = differences.gather(1, best_index).double()
    second = differences.scatter_(1, best_index, -torch.inf).amax(1, keepdim=True)
    base, second = second.clamp(min=torch.finfo(second.dtype).min), second.double()
    sums, unit = weigh(temperature)
    mass = sums.sum(1, True, dtype=torch.float64) / unit - 1
    moment = smoothed = segments = None
    if draw_temperature == temperature:
        segments = sums / unit
    if not fields.isdisjoint(("entropy", "smoothed_entropy")):
        moment = (by_segments(differences.mul_(weights)).sum(1, True, dtype=torch.float64) / unit).squeeze(1)
    if "smoothed_entropy" in fields:
        ratio = ((second - top) / temperature).exp()
        p = weights.scatter_(1, best_index, 0).mul_((ratio / (1 + ratio * mass) / unit).to(weights.dtype))
        smoothed = -by_segments(torch.add(p, EPSILON, out=differences).log_().mul_(p)).sum(1, dtype=torch.float64)
    if draw_temperature is not None:
        if segments is None:
            load()
            sums, unit = weigh(draw_temperature)
            segments = sums / unit
        best_weight = ((top - second) / draw_temperature).clamp_(max=MAX_LOG_WEIGHT).exp_()
        segments.scatter_add_(1, torch.div(best_index, SEGMENT, rounding_mode="floor"), best_weight - 1)
    return _RowSums(
        best_index.squeeze(1), top.squeeze(1), second.squeeze(1), mass.squeeze(1), moment, smoothed, segments
    )


def _from_sums(sums: _RowSums, fields: frozenset[str], temperature: float) -> TokenStats:
    """Compute statistics [...] from sums [...]."""
    top, second, mass = sums.top, sums.second, sums.mass
    nonfinite = (top - top).isnan()  # true for infinities too; `top` is NaN if any logit is
    log_ratio = (second - top) / temperature
    ratio = log_ratio.exp()
    others = ratio * mass
    total = 1 + others
    prob = total.reciprocal().masked_fill_(nonfinite, torch.nan)
    second_prob = ratio * prob
    entropy = smoothed = logsumexp = None
    if sums.moment is not None:
        # sum of exp(z) z over all tokens except the best, with z = (logit - top) / temperature; 0 if exp(z) underflows
        weighted_sum = ((sums.moment + mass * log_ratio) * ratio).masked_fill_(ratio == 0, 0)
        entropy = (others.log1p() - weighted_sum / total).masked_fill_(nonfinite, torch.nan)
    if sums.smoothed is not None:
        smoothed = sums.smoothed - prob * (prob + EPSILON).log()
    if "logsumexp" in fields:
        logsumexp = (top / temperature + others.log1p()).masked_fill_(nonfinite, torch.nan)
    gap = (top - second).masked_fill_(nonfinite, torch.nan)
    return TokenStats(sums.token, prob, second_prob, prob - second_prob, entropy, smoothed, logsumexp, gap, nonfinite)


def _sample(sums: _RowSums, logits: Tensor, draws: TokenDraws) -> Tensor:
    """Draw one token [...] int64 per row of logits [..., V]."""
    uniform, top = draws.uniform(), sums.top.unsqueeze(-1)
    assert sums.segments is not None

    def weights(tokens: Tensor) -> Tensor:
        return (logits.gather(-1, tokens).double() - top).div_(draws.temperature).exp_()

    def redraw(is_close: Tensor) -> Tensor:
        return float64_samples(logits[is_close], uniform[is_close], draws.temperature)

    return locate(sums.segments, uniform, logits.shape[-1], weights, redraw)


def float64_samples(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draw one token [...] int64 per row of logits [..., V] with uniform numbers [...], computed in float64."""
    samples, start, uniform = [], 0, uniform.flatten()
    for rows in row_blocks(logits, CPU_BLOCK):
        scaled = rows.to(torch.float64, copy=True).sub_(rows.amax(-1, keepdim=True)).div_(temperature)
        samples.append(draw(scaled.softmax(-1), uniform[start : start + len(rows)]))
        start += len(rows)
    return torch.cat(samples).view(logits.shape[:-1])
