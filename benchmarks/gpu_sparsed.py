"""SparseD's kernels on an NVIDIA GPU: checked against float64, then timed beside flash attention.

    python benchmarks/gpu_sparsed.py          # prints JSON; `benchmarks/gpu.py` runs it with the other kernels

Checks: fresh random inputs (the seed is in the result), every dtype, grouped heads, odd lengths, empty lists, windows;
each against softmax matrices in float64 of the same rounded inputs. Timings: an attention of LLaDA-8B's shape (32 heads
of 128, bfloat16, one row, 512 positions of answer, blocks of 128) at 8k to 64k positions. Queries and keys are random,
so the lists are too: neighbouring queries share fewer keys than a trained model's would.

- "speed_up": flash attention's time over that of a sparse step's attention; "ideal" is the same in multiplications.
- "estimation": what the step that finds the lists takes beyond one flash attention, in flash attentions.
- "window_ms": a block cache's step, 32 queries over all keys, `select` 0.3, beside PyTorch's choice for full attention.
- "end_to_end": one transformer layer (its matrix products measured, the rest left out) over T steps of which SparseD's
  20 % are dense and one finds lists, beside T dense steps: a request's gain, not a step's.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paradec.kernels.sparsed import (
    BlockIndex,
    QueryTiles,
    block_means,
    generation_block,
    select_blocks,
    sparse_attention,
)

LENGTHS = (8192, 16384, 32768, 65536)
SHARES = (0.1, 0.3, 0.5)
HEADS, WIDTH, HIDDEN, INNER, NEW, SIZE = 32, 128, 4096, 12288, 512, 128
SKIP, STEPS = 0.2, (128, 1024)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference of outputs of size one; bfloat16 keeps 8 bits."""
MEANS_TOLERANCE = 1e-5
# rows, heads, key/value heads, positions, head dimension, block
CHECKED = ((2, 4, 2, 1000, 128, 128), (1, 4, 2, 333, 96, 32), (1, 2, 2, 515, 256, 64))


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


def scores_of(query: Tensor, key: Tensor, lengths: list[int]) -> Tensor:
    """[B, H, Q, K] float64, -inf beyond a row's end."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    real = torch.arange(key.shape[2], device=key.device) < torch.tensor(lengths, device=key.device)[:, None]
    scores = query.double() @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~real[:, None, None], -torch.inf)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; equal infinities differ by nothing."""
    same = found.double() == expected
    return float(torch.where(same, 0.0, (found.double() - expected).abs()).max())


def check(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[dict[str, Any]]:
    """Every kernel on one shape and dtype."""
    query, key, value, index = inputs(shape, dtype, generator)
    rows, heads, groups, length, width, size = shape
    device, blocks, backend = query.device, math.ceil(length / size), "triton"
    lengths = [length, length - length // 3][:rows]
    values = value.double().repeat_interleave(heads // groups, 1)
    scores, results = scores_of(query, key, lengths), []

    def compare(name: str, error: float, tolerance: float) -> None:
        record = {"check": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        results.append(record | {"error": error, "tolerance": tolerance, "ok": error <= tolerance})

    allowed = index.to_mask(blocks).repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :length, :length]
    for name, lists, visible in (("lists", index, allowed), ("dense", None, torch.ones_like(allowed))):
        found, sums = sparse_attention(
            query, key, value, lists, lengths=lengths, return_logsumexp=True, block_size=size, backend=backend
        )
        masked = scores.masked_fill(~visible, -torch.inf)
        compare(name, difference(found, masked.softmax(-1).nan_to_num(0) @ values), TOLERANCE[dtype])
        compare(f"{name} log-sum-exp", difference(sums, masked.logsumexp(-1)), 1e-4)

    start = length // 3
    positions = np.arange(start, min(start + 32, length))[None].repeat(rows, 0)
    tiles = QueryTiles.of(positions, None, size, device)
    found = sparse_attention(
        query[:, :, start : start + 32], key, value, index, tiles=tiles, lengths=lengths, backend=backend
    )
    masked = scores.masked_fill(~allowed, -torch.inf)[:, :, start : start + 32]
    compare("window", difference(found, masked.softmax(-1).nan_to_num(0) @ values), TOLERANCE[dtype])

    first = generation_block(np.array(lengths), np.array([length // 4] * rows), size)
    means = block_means(query, key, size, lengths=lengths, first=first, backend=backend)
    known = block_means(
        query, key, size, lengths=lengths, first=first, logsumexp=scores.logsumexp(-1).float(), backend=backend
    )
    expected = torch.zeros_like(means, dtype=torch.float64)
    for row, real in enumerate(lengths):
        split, here = int(first[row]) * size, math.ceil(real / size)
        p = scores[row, :, :real, :real].softmax(-1)
        p[:, :, split:] = scores[row, :, :real, split:real].softmax(-1)
        p = F.pad(p, (0, here * size - real, 0, here * size - real)).view(heads, here, size, here, size).sum((2, 4))
        extent = torch.full((here,), float(size), device=device, dtype=torch.float64)
        extent[-1] = real - (here - 1) * size
        expected[row, :, :here, :here] = p / (extent[:, None] * extent)
    compare("means", difference(means, expected), MEANS_TOLERANCE)
    compare("means, known log-sum-exp", difference(known, expected), MEANS_TOLERANCE)
    return results


def milliseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median of so many runs on the device, after two that do not count."""
    times = []
    for turn in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def layer_products(length: int, device: torch.device) -> Callable[[], Any]:
    """The matrix products of one LLaDA-8B layer besides attention."""
    hidden = torch.randn(length, HIDDEN, device=device, dtype=torch.bfloat16)
    square = [torch.randn(HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(4)]
    up, gate, down = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in SHAPES_OF_MLP)

    def run() -> None:
        for weight in square:
            F.linear(hidden, weight)
        F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)

    return run


SHAPES_OF_MLP = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))


def measure(length: int, device: torch.device) -> dict[str, Any]:
    """Times of one length."""
    # as projections lay them out: position by position
    query, key, value = (
        torch.randn(1, length, HEADS, WIDTH, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    lengths = np.array([length])
    first = generation_block(lengths, np.array([NEW]), SIZE)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value)

    def with_sums() -> tuple[Tensor, Tensor]:
        return sparse_attention(query, key, value, None, return_logsumexp=True)

    sums = with_sums()[1]

    def means() -> Tensor:
        return block_means(query, key, SIZE, first=first, logsumexp=sums)

    found = means()
    dense = milliseconds(flash)
    times = {
        "flash": dense,
        "sdpa_default": milliseconds(lambda: F.scaled_dot_product_attention(query, key, value)),
        "dense_with_sums": milliseconds(with_sums),
        "means": milliseconds(means),
        "means_two_passes": milliseconds(lambda: block_means(query, key, SIZE, first=first)),
        "selection": milliseconds(lambda: select_blocks(found, 0.3, SIZE, lengths=lengths, first=first)),
        "products": milliseconds(layer_products(length, device)),
    }
    # the step that finds the lists takes the place of a dense one
    extra = times["dense_with_sums"] + times["means"] + times["selection"] - dense
    shares = []
    for share in SHARES:
        index = select_blocks(found, share, SIZE, lengths=lengths, first=first)
        density = float(index.count.double().mean()) / math.ceil(length / SIZE)
        sparse = milliseconds(lambda index=index: sparse_attention(query, key, value, index))
        record = {"select": share, "density": density, "ms": sparse, "speed_up": dense / sparse, "ideal": 1 / density}
        for steps in STEPS:
            full = int(steps * SKIP) + 2
            together = full * (times["products"] + dense) + extra + (steps - full) * (times["products"] + sparse)
            record[f"end_to_end_{steps}"] = steps * (times["products"] + dense) / together
        shares.append(record | {"list_bytes": index.nbytes})
    # a block cache's step: 32 queries of the answer over all keys
    index = select_blocks(found, 0.3, SIZE, lengths=lengths, first=first)
    start = (length - NEW) // SIZE * SIZE
    tiles = QueryTiles.of(np.arange(start, start + 32)[None], None, SIZE, device)
    few = query[:, :, start : start + 32]
    window = {
        "sdpa_default": milliseconds(lambda: F.scaled_dot_product_attention(few, key, value)),
        "sparse": milliseconds(lambda: sparse_attention(few, key, value, index, tiles=tiles)),
    }
    flops = 4 * HEADS * WIDTH * length**2
    return {
        "length": length,
        "ms": times,
        "flash_tflops": flops / dense / 1e9,
        "estimation": extra / dense,
        "shares": shares,
        "window_ms": window,
    }


def run(device: torch.device | str = "cuda") -> dict[str, Any]:
    """Checks, then timings: {"ok", "seed", "checks", "timings", "seconds"}. Nothing is timed where a check fails."""
    device, begin = torch.device(device), time.perf_counter()
    seed = time.time_ns() % 2**31
    generator = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode():
        checks = [record for shape in CHECKED for dtype in TOLERANCE for record in check(shape, dtype, generator)]
        ok = all(record["ok"] for record in checks)
        timings = []
        if ok:
            for length in LENGTHS:
                timings.append(measure(length, device))
                torch.cuda.empty_cache()
    return {"ok": ok, "seed": seed, "checks": checks, "timings": timings, "seconds": time.perf_counter() - begin}


def main() -> None:
    if not torch.cuda.is_available():
        print("benchmarks/gpu_sparsed.py needs an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        raise SystemExit(2)
    result = run()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__} | result, indent=1))
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
