"""SparseD's kernels on an NVIDIA GPU: checked against float64, then timed and compared with flash attention.

    python benchmarks/gpu.py --only sparsed

Checks: new random inputs (the seed is in the result), every dtype, grouped heads, odd lengths, empty lists, windows.
Each result is compared with a full softmax in float64 over the same rounded inputs. Timings: an attention of LLaDA-8B's
shape (32 heads of 128, bfloat16, one row, 512 positions of answer, blocks of 128) at 8k to 64k positions. Queries and
keys are random, and so are the lists of key blocks that each query block reads: neighbouring queries share fewer keys
than in a trained model.

- "speed_up": flash attention's time over that of the sparse attention; "ideal" is the ratio of multiplications.
  "flex_speed_up" is the speed-up of PyTorch's compiled flex_attention with the same lists (`backend="flex"`),
  "flex_difference" the largest difference of its output to that of paradec's kernel.
- "estimation": additional time of the step that finds the lists, as a multiple of flash attention's time.
- "window_speed_up": in a block cache's step (32 queries, all keys), PyTorch's default attention's time over the sparse.
- "end_to_end_T": speed-up of one transformer layer (only its matrix products and attention) over a request of T steps.
  As in SparseD, 20 % of its steps are dense and one finds the lists; the base is T dense steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timing import Section, milliseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paradec.kernels.block_sparse import (
    BlockIndex,
    QueryTiles,
    block_means,
    generation_block,
    interpreting,
    select_blocks,
    sparse_attention,
)  # fmt: skip
from paradec.kernels.block_sparse.reference import reference_attention, reference_means, visible_keys

SHARES = (0.1, 0.3, 0.5)
FLEX_SHARE = 0.3
"""The only share for which flex_attention is measured, since it takes long to compile."""
SKIP, STEPS = 0.2, (128, 1024)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest allowed difference of outputs of magnitude 1; bfloat16 has 8 bits of precision."""
MEANS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements; with `DRY` the same code runs in seconds, on a CPU."""

    # rows, heads, key/value heads, positions, head dimension, block
    checked: tuple[tuple[int, ...], ...] = ((2, 4, 2, 1000, 128, 128), (1, 4, 2, 333, 96, 32), (1, 2, 2, 515, 256, 64))
    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)
    heads: int = 32
    width: int = 128
    hidden: int = 4096
    inner: int = 12_288
    new: int = 512
    size: int = 128
    window: int = 32
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 5


DRY = Scale(
    checked=((2, 4, 2, 37, 16, 16),), lengths=(96,), heads=2, width=16, hidden=32, inner=48, new=32, size=16, window=8,
    dtype=torch.float32, repeats=1,
)  # fmt: skip


def kernel_backend(device: torch.device) -> str:
    return "triton" if device.type == "cuda" or interpreting() else "torch"


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, BlockIndex]:
    rows, heads, groups, length, width, size = shape
    device, blocks = generator.device, math.ceil(length / size)
    query, key, value = (
        torch.randn(rows, count, length, width, generator=generator, device=device).to(dtype)
        for count in (heads, groups, groups)
    )
    mask = torch.rand(rows, heads, blocks, blocks, generator=generator, device=device) < 0.4
    mask[0, 0, 0] = False
    return query, key, value, BlockIndex.from_mask(mask, size)


def difference(output: Tensor, expected: Tensor) -> float:
    """Compute the largest absolute difference; equal infinities count as 0."""
    same = output.double() == expected
    return float(torch.where(same, 0.0, (output.double() - expected).abs()).max())


def check(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[dict[str, Any]]:
    """Check every kernel with one shape and dtype. Raises AssertionError for a difference above the tolerance."""
    query, key, value, index = inputs(shape, dtype, generator)
    rows, _, _, length, _, size = shape
    device, blocks, backend = query.device, math.ceil(length / size), kernel_backend(query.device)
    lengths = [length, length - length // 3][:rows]
    results = []

    def compare(name: str, error: float, tolerance: float) -> None:
        record = {"check": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        results.append(record | {"error": error, "tolerance": tolerance})
        assert error <= tolerance, results[-1]

    every = torch.arange(length, device=device).expand(rows, -1)
    allowed = visible_keys(index.to_mask(blocks), size, every, length)
    for name, lists, visible in (("lists", index, allowed), ("dense", None, torch.ones_like(allowed))):
        output, sums = sparse_attention(
            query, key, value, lists, lengths=lengths, return_logsumexp=True, block_size=size, backend=backend
        )
        expected, expected_sums = reference_attention(query, key, value, visible, lengths)
        compare(name, difference(output, expected), TOLERANCE[dtype])
        compare(f"{name} log-sum-exp", difference(sums, expected_sums), 1e-4)

    start = length // 3
    positions = np.arange(start, min(start + 32, length))[None].repeat(rows, 0)
    tiles = QueryTiles.from_positions(positions, None, size, device)
    window = query[:, :, start : start + 32]
    output = sparse_attention(window, key, value, index, tiles=tiles, lengths=lengths, backend=backend)
    expected, _ = reference_attention(window, key, value, allowed[:, :, start : start + 32], lengths)
    compare("window", difference(output, expected), TOLERANCE[dtype])

    first = generation_block(np.array(lengths), np.array([length // 4] * rows), size)
    means = block_means(query, key, size, lengths=lengths, first=first, backend=backend)
    sums = reference_attention(query, key, value, torch.ones_like(allowed), lengths)[1].float()
    known = block_means(query, key, size, lengths=lengths, first=first, logsumexp=sums, backend=backend)
    expected = reference_means(query, key, size, lengths, first.tolist())
    compare("means", difference(means, expected), MEANS_TOLERANCE)
    compare("means, known log-sum-exp", difference(known, expected), MEANS_TOLERANCE)
    return results


def layer_products(length: int, device: torch.device, scale: Scale) -> Callable[[int], Any]:
    """Build a function that computes the matrix products of one layer, without attention."""

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=scale.dtype)

    hidden = weight(length, scale.hidden)
    square = [weight(scale.hidden, scale.hidden) for _ in range(4)]
    up, gate, down = (
        weight(scale.inner, scale.hidden),
        weight(scale.inner, scale.hidden),
        weight(scale.hidden, scale.inner),
    )

    def run(_: int) -> None:
        for matrix in square:
            F.linear(hidden, matrix)
        F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)

    return run


def measure(section: Section, length: int, device: torch.device, scale: Scale) -> list[dict[str, Any]]:
    """Measure one length; return a row for each share of selected blocks."""
    size, backend = scale.size, kernel_backend(device)
    # heads are strided as in the output of a projection: [1, length, heads, width] in memory
    query, key, value = (
        torch.randn(1, length, scale.heads, scale.width, device=device, dtype=scale.dtype).transpose(1, 2)
        for _ in range(3)
    )
    lengths = np.array([length])
    first = generation_block(lengths, np.array([scale.new]), size)

    def time_ms(run: Callable[[int], Any]) -> float:
        return milliseconds(run, device, scale.repeats, 2)

    def flash(_: int) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value)

    def with_sums(_: int = 0) -> tuple[Tensor, Tensor]:
        return sparse_attention(query, key, value, None, return_logsumexp=True, block_size=size, backend=backend)

    sums = with_sums()[1]

    def means(_: int = 0) -> Tensor:
        return block_means(query, key, size, first=first, logsumexp=sums, backend=backend)

    pooled = means()

    def lists(share: float, _: int = 0) -> BlockIndex:
        return select_blocks(pooled, share, size, lengths=lengths, first=first)

    dense_ms, products = time_ms(flash), time_ms(layer_products(length, device, scale))
    # the step that finds the lists replaces a dense one
    extra = time_ms(with_sums) + time_ms(means) + time_ms(partial(lists, 0.3)) - dense_ms
    start = (length - scale.new) // size * size
    tiles = QueryTiles.from_positions(np.arange(start, start + scale.window)[None], None, size, device)
    window_query = query[:, :, start : start + scale.window]
    window_ms = time_ms(lambda _: F.scaled_dot_product_attention(window_query, key, value))
    rows = []
    for share in SHARES:
        index = lists(share)

        def sparse(_: int = 0, index: BlockIndex = index, backend: str = backend) -> Tensor:
            return sparse_attention(query, key, value, index, backend=backend)

        def part(_: int, index: BlockIndex = index) -> Tensor:
            return sparse_attention(window_query, key, value, index, tiles=tiles, backend=backend)

        density = float(index.count.double().mean()) / math.ceil(length / size)
        sparse_ms = time_ms(sparse)
        row: dict[str, Any] = {
            "length": length,
            "select": share,
            "density": density,
            "flash_ms": dense_ms,
            "sparse_ms": sparse_ms,
            "speed_up": dense_ms / sparse_ms,
            "ideal": 1 / density,
            "estimation": extra / dense_ms,
            "window_speed_up": window_ms / time_ms(part),
            "list_bytes": index.nbytes,
        }
        for steps in STEPS:
            full = int(steps * SKIP) + 2
            together = full * (products + dense_ms) + extra + (steps - full) * (products + sparse_ms)
            row[f"end_to_end_{steps}"] = steps * (products + dense_ms) / together

        def flexed(sparse: Callable[..., Tensor] = sparse) -> dict[str, float]:
            difference = float((sparse(backend="flex") - sparse()).abs().max())
            flex_ms = time_ms(lambda i: sparse(i, backend="flex"))
            return {"flex_speed_up": dense_ms / flex_ms, "flex_difference": difference}

        if share == FLEX_SHARE:
            row |= section.attempt(f"flex_attention at {length}", flexed) or {}
        rows.append(row)
    return rows


def run(section: Section, device: torch.device, scale: Scale) -> dict[str, Any]:
    """Run the checks, then the timings; return "checks", "rows" and "seed". If a check fails, nothing is timed."""
    seed = time.time_ns() % 2**31
    generator = torch.Generator(device).manual_seed(seed)
    checks, rows = [], []
    with torch.inference_mode():
        for shape in scale.checked:
            for dtype in TOLERANCE:
                what = f"checks of SparseD, {shape}, {dtype}"
                checks += section.attempt(what, lambda s=shape, d=dtype: check(s, d, generator)) or []
        if not section.problems:
            for length in scale.lengths:
                timings = section.attempt(
                    f"SparseD at {length}", lambda length=length: measure(section, length, device, scale)
                )
                rows += timings or []
    return section.close(seed=seed, checks=checks, rows=rows)
