"""Linear layers with int8 weights: the definition of the results, in exact integers."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_INT8 = 127
HIGH = 128
"""Factor of the high row when an activation v has two int8 rows: v = 128 high + low, |low| <= 64."""
CHUNK = 2**22
"""Number of weights rounded at a time; bounds the memory in float32."""
ACTIVATION_BITS = (15, 8)
"""Possible bits of an activation: 15 in two int8 rows (the default), or 8 in one."""


def quantize_weight(weight: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Round each row of a matrix to int8. Rows with NaN or infinity get the scale NaN.

    weight: [..., N outputs, K inputs], any float dtype. bits: 8, or 7 on processors with inexact products of 8 bits.
    Returns int8 [..., N, K] in -127..127 (-63..63 for 7 bits), and float32 scales [..., N]."""
    largest = 2 ** (bits - 1) - 1
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    rows = max(1, CHUNK // weight.shape[-1])
    parts = (tensor.view(-1, weight.shape[-1]).split(rows) for tensor in (weight.contiguous(), rounded))
    for part, part_rounded, part_scale in zip(*parts, scale.view(-1).split(rows), strict=True):
        part_scale.copy_(_scale(part.float(), largest))
        part_rounded.copy_((part.float() / part_scale.unsqueeze(-1)).nan_to_num_(0).round_())
    return rounded, scale


def quantize_rows(x: Tensor, activations: int = 15) -> tuple[Tensor, Tensor]:
    """Round each row of activations [M, K] to `activations` bits, 15 or 8.

    Returns int8 rows and float32 scales [M]. For 15 bits the rows are [2 M, K], high rows before low rows; for 8 bits
    [M, K]. A row with NaN or infinity has the scale NaN."""
    x = x.float()
    largest = MAX_INT8 if activations == 8 else MAX_INT8 * HIGH
    scale = _scale(x, largest)
    rounded = (x / scale.unsqueeze(-1)).round_()
    if activations == 8:
        return rounded.to(torch.int8), scale
    high = (rounded / HIGH).round_()
    return torch.cat((high.to(torch.int8), rounded.sub_(high, alpha=HIGH).to(torch.int8))), scale


def reference_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, activations: int = 15
) -> Tensor:
    """Definition of `int8_linear` in float64: v = round(x / s), y = s * scale * (v weight^T) + bias; s: row's scale."""
    rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]), activations)
    high, *low = rows.long().split(x.shape[:-1].numel())
    values = HIGH * high + low[0] if low else high
    products = values @ weight.long().t()
    result = products.double() * row_scale.double().unsqueeze(-1) * scale.double()
    result = result if bias is None else result + bias.double()
    return result.view(*x.shape[:-1], len(weight))


def _scale(rows: Tensor, largest: int) -> Tensor:
    """[M]: max |row| / largest, at least the smallest normal number; NaN for a row with NaN or infinity."""
    top = rows.abs().amax(-1)
    return (top / largest).clamp_min_(torch.finfo(torch.float32).tiny).masked_fill_(~top.isfinite(), torch.nan)
