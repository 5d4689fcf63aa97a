"""Linear layers with int8 weights on `torch._int_mm`, and a check that its products are exact here."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from paradec.kernels.int8.reference import HIGH, LARGEST, quantize_rows

ROWS_PER_PRODUCT = 1024
"""Rows of activations in one product, which bounds the memory of its int32 sums."""
MAX_INPUTS = (2**31 - 1) // LARGEST**2
"""Width beyond which an int32 sum may overflow."""
MIN_CUDA_ROWS = 32
"""`torch._int_mm` takes more than 16 rows on CUDA, and sizes in multiples of 8."""


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, activations: int = 15) -> Tensor:
    """x weight^T with int8 weights and rounded activations. A row does not depend on the others.

    Args:
        x: [..., K], any float dtype; rows with NaN or infinity (also as float32) give NaN.
        weight: int8 [N, K] in any layout, fastest as the transpose of [K, N]. scale: float32 [N].
        bias: [N] or None.
        activations: 15 bits in two int8 rows, or 8 bits.

    Returns:
        [..., N] in the dtype of x, computed in float32.
    """
    flat = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu" or (x.is_cuda and not any(size % 8 for size in weight.shape)):
        parts = [_product(part, weight, scale, activations) for part in flat.split(ROWS_PER_PRODUCT)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:  # no integer product on this device
        result = functional.linear(flat.float(), weight.float()) * scale
    if bias is not None:
        result += bias
    return result.to(x.dtype).view(*x.shape[:-1], len(weight))


def _product(x: Tensor, weight: Tensor, scale: Tensor, activations: int) -> Tensor:
    rows, row_scale = quantize_rows(x, activations)
    products = _int_product(rows, weight)
    result = products[: len(x)].to(torch.float32)
    if activations != 8:
        result = result.mul_(HIGH).add_(products[len(x) :])
    return result.mul_(row_scale.unsqueeze(-1)).mul_(scale)


def _int_product(rows: Tensor, weight: Tensor) -> Tensor:
    """int32 [M, N]: rows [M, K] weight [N, K]^T."""
    count = len(rows)
    if not count:
        return torch.empty(0, len(weight), dtype=torch.int32, device=rows.device)
    if rows.is_cuda:
        rows = functional.pad(rows, (0, 0, 0, max(MIN_CUDA_ROWS - count, -count % 8)))
    return torch._int_mm(rows, weight.t())[:count]


@lru_cache
def weight_bits(device_type: str = "cpu") -> int:
    """The bits of weights for which products are exact on this kind of device: 8, or 7 where sums of two products
    saturate at 16 bits (processors without VNNI). Checked once per process. Raises RuntimeError if neither is exact."""
    for bits in (8, 7):
        if all(_is_exact(rows, 2 ** (bits - 1) - 1, device_type) for rows in (1, 2, 3, 16, 67)):
            return bits
    raise RuntimeError(f"torch._int_mm gives wrong sums on this {device_type}, so that int8 weights cannot be used")


def _is_exact(count: int, largest: int, device_type: str) -> bool:
    """Compare a product of extreme and random values with int64."""
    generator = torch.Generator().manual_seed(0)
    for width in (64, 1000):
        rows = torch.randint(-LARGEST, LARGEST + 1, (count, width), generator=generator)
        weight = torch.randint(-largest, largest + 1, (96, width), generator=generator)
        rows[0], weight[0], weight[1] = LARGEST, largest, -largest
        product = _int_product(rows.to(device_type, torch.int8), weight.to(device_type, torch.int8)).cpu()
        if not torch.equal(product.long(), rows @ weight.t()):
            return False
    return True
