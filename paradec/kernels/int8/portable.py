"""Linear layers with int8 weights on `torch._int_mm` or oneDNN's packed weights, and checks that products are exact.

oneDNN reads packed weights in one pass, whereas `torch._int_mm` packs them again for each product."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paradec.kernels.int8.reference import HIGH, MAX_INT8, quantize_rows

SUMS_PER_PRODUCT = 2**24
"""Maximum number of sums that one product computes; bounds its memory."""
MAX_INPUTS = (2**31 - 1) // (255 * MAX_INT8)
"""Number of inputs beyond which an int32 sum may overflow: products of packed weights shift activations to 0..255."""
MIN_CUDA_ROWS = 32
"""On CUDA, `torch._int_mm` needs more than 16 rows, and sizes that are multiples of 8."""
SLOW_SECONDS = 0.02
"""A product in `has_packed_product` of this many seconds is slow: oneDNN's reference takes 0.1 s, others 0.1 ms."""


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, activations: int = 15) -> Tensor:
    """Compute x weight^T with int8 weights and rounded activations. A row's result does not depend on other rows.

    Args:
        x: [..., K inputs], any float dtype. In integer products, rows with NaN or infinity (in float32) give NaN.
        weight: int8 [N outputs, K] in any layout, fastest as the transpose of [K, N]; or packed (`pack_weight`).
        scale: float32 [N].
        bias: [N] or None.
        activations: bits of an activation, 15 (in two int8 rows) or 8.

    Returns:
        [..., N] in the dtype of x, computed in float32."""
    flat = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu" or (x.is_cuda and not any(size % 8 for size in weight.shape)):
        rows = max(1, SUMS_PER_PRODUCT // len(scale))
        parts = [_product(part, weight, scale, bias, activations).to(x.dtype) for part in flat.split(rows)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:  # no integer product on this device: activations are not rounded
        result = functional.linear(flat.float(), weight.float()) * scale
        result = (result if bias is None else result + bias).to(x.dtype)
    return result.view(*x.shape[:-1], len(scale))


def _product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, activations: int) -> Tensor:
    rows, row_scale = quantize_rows(x, activations)
    products = _packed_product(rows, weight) if weight.is_mkldnn else _int_product(rows, weight)
    result = products[: len(x)].to(torch.float32)
    if activations != 8:
        result = result.mul_(HIGH).add_(products[len(x) :])
    result = result.mul_(row_scale.unsqueeze(-1)).mul_(scale)
    return result if bias is None else result.add_(bias)


def _int_product(rows: Tensor, weight: Tensor) -> Tensor:
    """int32 [M, N]: the product of int8 rows [M, K] and the transpose of `weight` [N, K]."""
    count = len(rows)
    if not count:
        return torch.empty(0, len(weight), dtype=torch.int32, device=rows.device)
    if rows.is_cuda:
        rows = functional.pad(rows, (0, 0, 0, max(MIN_CUDA_ROWS - count, -count % 8)))
    return torch._int_mm(rows, weight.t())[:count]


def is_packable(weight: Tensor) -> bool:
    """Whether an int8 weight is not packed yet and this processor computes products of packed weights."""
    return weight.device.type == "cpu" and not weight.is_mkldnn and has_packed_product()


def pack_weight(weight: Tensor) -> Tensor:
    """Pack an int8 matrix [N, K]. The result has no storage to copy or write; its `to_dense()` is [K, N]."""
    return torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)


def _packed_product(rows: Tensor, packed: Tensor) -> Tensor:
    """float32 [M, N]: the product of int8 rows [M, K] and `packed` [K, N], with exact int32 sums.

    oneDNN's fast product takes unsigned rows and their zero point, so 128 is added to the rows."""
    if not len(rows):
        return torch.empty(0, packed.shape[1])
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    shifted = rows.view(torch.uint8) ^ 128
    arguments: tuple[Any, ...] = (shifted, 1.0, 128, packed, one, zero, None, 1.0, 0, torch.float32, "none", [], "")
    return torch.ops.onednn.qlinear_pointwise(*arguments)


@lru_cache
def has_packed_product() -> bool:
    """Whether this processor computes products of packed weights exactly and fast. Checked once per process."""
    try:
        if not all(_is_exact(rows, 127, "cpu", packed=True) for rows in (1, 2, 3, 16, 67)):
            return False
        rows = torch.zeros(16, 512, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(torch.zeros(512, 512, dtype=torch.int8), None)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            _packed_product(rows, packed)
            seconds.append(time.perf_counter() - start)
        return min(seconds) < SLOW_SECONDS
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


@lru_cache
def weight_bits(device_type: str = "cpu") -> int:
    """Largest number of weight bits with exact products on this kind of device: 8, or 7 on processors without VNNI,
    where sums of two products saturate at 16 bits. Checked once per process. Raises RuntimeError if 7 is inexact."""
    for bits in (8, 7):
        if all(_is_exact(rows, 2 ** (bits - 1) - 1, device_type) for rows in (1, 2, 3, 16, 67)):
            return bits
    raise RuntimeError(f"torch._int_mm gives wrong sums on this {device_type}, so that int8 weights cannot be used")


def _is_exact(count: int, largest: int, device_type: str, packed: bool = False) -> bool:
    """Whether a product of extreme and random values equals the product in int64."""
    generator = torch.Generator().manual_seed(0)
    for width in (64, 1000):
        rows = torch.randint(-MAX_INT8, MAX_INT8 + 1, (count, width), generator=generator)
        weight = torch.randint(-largest, largest + 1, (96, width), generator=generator)
        rows[0], weight[0], weight[1] = MAX_INT8, largest, -largest
        int8_rows, int8_weight = (values.to(device_type, torch.int8) for values in (rows, weight))
        if packed:
            product = _packed_product(int8_rows, torch.ops.onednn.qlinear_prepack(int8_weight, None))
        else:
            product = _int_product(int8_rows, int8_weight).cpu()
        if not torch.equal(product, (rows @ weight.t()).to(product.dtype)):
            return False
    return True
