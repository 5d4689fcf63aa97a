"""The "triton" backend. Imports triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paradec.kernels import interpreting
from paradec.kernels.block_sparse.lists import AttentionCall, blocks_in


def means(
    query: Tensor,
    key: Tensor,
    size: int,
    lengths: np.ndarray,
    first: np.ndarray,
    logsumexp: Tensor | None,
    scale: float,
) -> Tensor:
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    rows, heads, length, width = query.shape
    blocks = -(-length // size)
    bounds = torch.as_tensor(np.stack((lengths, first)), dtype=torch.int32, device=query.device)
    shapes = _tile_shapes(query, size)
    common = (*query.stride()[:3], *key.stride()[:3], heads, heads // key.shape[1], length, scale)
    # log-sum-exps [2, B, H, L]: over all keys, and over the keys of blocks from `first` on (the answer)
    lse = torch.empty((2, rows, heads, length), dtype=torch.float32, device=query.device)
    if logsumexp is not None:
        lse[0] = logsumexp
    has_answer = bool((first < blocks_in(lengths, size)).any())
    for over_answer in range(2):
        if (over_answer == 0 and logsumexp is None) or (over_answer == 1 and has_answer):
            grid = (-(-length // shapes["QUERIES"]), rows * heads)
            _logsumexp_kernel[grid](
                query,
                key,
                lse[over_answer],
                bounds,
                *common,
                SIZE=size,
                AFTER=over_answer,
                **shapes,
                **_launch(query, shapes),
            )
    means = torch.empty((rows, heads, blocks, blocks), dtype=torch.float32, device=query.device)
    mean_shapes = shapes | {"QUERIES": max(16, triton.next_power_of_2(size))}
    _means_kernel[(blocks, rows * heads)](
        query, key, lse, means, bounds, rows, *common, blocks, SIZE=size, **mean_shapes, **_launch(query, mean_shapes)
    )
    return means


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    query, key, value, index, tiles, lengths, rows, scale, size, return_logsumexp = call
    query, key, value = (p if p.stride(-1) == 1 else p.contiguous() for p in (query, key, value))
    (batch, heads, columns, width), device = query.shape, query.device
    if value.shape[-1] != width:
        raise ValueError(f"backend='triton' needs one head dimension; keys have {width}, values {value.shape[-1]}")
    shapes = _tile_shapes(query, size, tiles.max_columns)
    splits = -(-min(size, tiles.max_columns) // shapes["QUERIES"])
    programs = tiles.block.shape[1] * splits * batch * heads
    num_shares = _num_shares(programs, -(-key.shape[2] // size) if index is None else index.blocks.shape[3], device)
    # memory order (columns, heads, width), as the output projection reads it; padding columns stay 0
    output_dtype = value.dtype if num_shares == 1 else torch.float32
    output = torch.zeros((num_shares, batch, columns, heads, width), dtype=output_dtype, device=device).transpose(2, 3)
    lse = torch.full((num_shares, batch, heads, columns), -torch.inf, dtype=torch.float32, device=device)
    row_data = torch.as_tensor(np.stack((lengths, rows)), dtype=torch.int32, device=device)
    # without an index, the kernel does not read `count` and `blocks`: any tensor will do
    count, blocks = (row_data, row_data) if index is None else (index.count.contiguous(), index.blocks.contiguous())
    _attention_kernel[(tiles.block.shape[1] * splits, batch * heads, num_shares)](
        query, key, value, output, lse, count, blocks, row_data, tiles.block, tiles.first, tiles.count,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:4],
        heads, heads // key.shape[1], columns, batch, tiles.block.shape[1],
        1 if index is None else count.shape[2], 1 if index is None else blocks.shape[3], scale,
        SIZE=size, SPLITS=splits, DENSE=index is None, **shapes, **_launch(query, shapes),
    )  # fmt: skip
    if num_shares == 1:
        return output[0], lse[0] if return_logsumexp else None
    total = lse.logsumexp(0)
    weights = (lse - total).exp().nan_to_num(0.0).unsqueeze(-1)  # NaN for an empty list: -inf - -inf
    return (weights * output).sum(0).to(value.dtype), total if return_logsumexp else None


def _num_shares(programs: int, max_blocks: int, device: torch.device) -> int:
    """Number of programs that share one list: several if `programs`, one per list, are too few to fill the device."""
    if device.type != "cuda":
        return 1
    min_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-min_programs // programs), max_blocks // 4, 16))


def _tile_shapes(query: Tensor, size: int, queries: int | None = None) -> dict[str, Any]:
    """Compile-time constants: queries and keys per tile, head dimension, precision."""
    width = query.shape[-1]
    padded = max(16, triton.next_power_of_2(width))
    needed = triton.next_power_of_2(size if queries is None else min(size, queries))
    # 2**14 bytes of keys at a time, so that queries, keys, values and prefetched tiles fit into shared memory
    keys = min(64, triton.next_power_of_2(size), 2**14 // (padded * query.itemsize))
    return {
        "QUERIES": max(16, min(128 if width <= 128 else 64, needed)),
        "KEYS": max(16, keys),
        "WIDTH": width,
        "PADDED": padded,
        # the interpreter treats bfloat16 as an integer
        "UPCAST": query.dtype == torch.bfloat16 and interpreting(),
        # "ieee": products of float32 must not be rounded to the tensor cores' 10 bits
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _launch(query: Tensor, shapes: dict[str, Any]) -> dict[str, int]:
    """Warps and pipeline stages, without autotuning: it would delay every new shape."""
    is_large = shapes["QUERIES"] * shapes["PADDED"] >= 128 * 128
    return {"num_warps": 8 if is_large else 4, "num_stages": 2 if query.dtype == torch.float32 else 3}


@triton.jit
def _load(pointer, rows, stride, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr):
    """Load [rows, PADDED] of a matrix, 0 where not `inside` or beyond WIDTH."""
    column = tl.arange(0, PADDED)
    addresses = pointer + rows[:, None] * stride + column[None, :]
    tile = tl.load(addresses, mask=inside[:, None] & (column[None, :] < WIDTH), other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _attention_kernel(
    query, key, value, out, lse_output, counts, blocks, row_data, tile_block, tile_first, tile_count,
    query_row, query_head, query_step, key_row, key_head, key_step, value_row, value_head, value_step,
    out_share, out_row, out_head, out_step, heads, group_size, columns, batch, tiles, query_blocks, max_blocks, scale,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, DENSE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a query block (or a part of it) over one share of its list of key blocks, for one row and head.
    Softmax in base 2."""
    tile = tl.program_id(0) // SPLITS
    part = tl.program_id(0) % SPLITS
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    count = tl.load(tile_count + row * tiles + tile)
    if part * QUERIES >= count:
        return
    offset = part * QUERIES + tl.arange(0, QUERIES)
    is_query = offset < count
    column = tl.load(tile_first + row * tiles + tile) + offset
    q = _load(query + row * query_row + head * query_head, column, query_step, is_query, WIDTH, PADDED, UPCAST)
    key += row * key_row + (head // group_size) * key_head
    value += row * value_row + (head // group_size) * value_head
    length = tl.load(row_data + row)
    if DENSE:
        num_blocks = (length + SIZE - 1) // SIZE
    else:
        list_index = (tl.load(row_data + batch + row).to(tl.int64) * heads + head) * query_blocks
        list_index += tl.load(tile_block + row * tiles + tile)
        num_blocks = tl.load(counts + list_index)
        blocks += list_index * max_blocks
    PARTS: tl.constexpr = (SIZE + KEYS - 1) // KEYS
    share = tl.program_id(2)
    shares = tl.num_programs(2)
    log2_scale = scale * 1.4426950408889634
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted_sum = tl.zeros([QUERIES, PADDED], tl.float32)
    for step in range(num_blocks * share // shares * PARTS, num_blocks * (share + 1) // shares * PARTS):
        if DENSE:
            block = step // PARTS
        else:
            block = tl.load(blocks + step // PARTS).to(tl.int32)
        offset_in_block = (step % PARTS) * KEYS + tl.arange(0, KEYS)
        position = block * SIZE + offset_in_block
        is_key = (offset_in_block < SIZE) & (position < length)
        k = _load(key, position, key_step, is_key, WIDTH, PADDED, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # if all keys so far are beyond the row's end, this avoids -inf - -inf
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(value, position, value_step, is_key, WIDTH, PADDED, UPCAST)
        weighted_sum = weighted_sum * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = new_highest
    has_weight = total > 0
    weighted_sum = weighted_sum / tl.where(has_weight, total, 1.0)[:, None]
    width = tl.arange(0, PADDED)
    addresses = out + share * out_share + row * out_row + head * out_head + column[:, None] * out_step + width[None, :]
    tl.store(addresses, weighted_sum.to(out.dtype.element_ty), mask=is_query[:, None] & (width[None, :] < WIDTH))
    lse = (highest + tl.log2(tl.where(has_weight, total, 1.0))) * 0.6931471805599453
    addresses = ((share * batch + row) * heads + head) * columns + column
    tl.store(lse_output + addresses, tl.where(has_weight, lse, float("-inf")), mask=is_query)


@triton.jit
def _logsumexp_kernel(
    query, key, lse_output, bounds, query_row, query_head, query_step, key_row, key_head, key_step,
    heads, group_size, columns, scale, SIZE: tl.constexpr, AFTER: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each query's scores over all keys; with AFTER, over the keys of blocks from `first` on."""
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    length = tl.load(bounds + row)
    column = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_query = column < length
    q = _load(query + row * query_row + head * query_head, column, query_step, is_query, WIDTH, PADDED, UPCAST)
    key += row * key_row + (head // group_size) * key_head
    begin = 0
    if AFTER:
        begin = tl.load(bounds + tl.num_programs(1) // heads + row) * SIZE
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in range(begin, length, KEYS):
        position = start + tl.arange(0, KEYS)
        is_key = position < length
        k = _load(key, position, key_step, is_key, WIDTH, PADDED, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        total = total * tl.exp2(highest - new_highest) + tl.sum(tl.exp2(scores - new_highest[:, None]), 1)
        highest = new_highest
    lse = (highest + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_output + (row * heads + head) * columns + column, lse, mask=is_query)


@triton.jit
def _means_kernel(
    query, key, lse, means, bounds, rows, query_row, query_head, query_step, key_row, key_head, key_step,
    heads, group_size, columns, scale, blocks, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean attention probability of each key block for one query block."""
    block = tl.program_id(0)
    row = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    length = tl.load(bounds + row)
    first = tl.load(bounds + rows + row)
    offset = tl.arange(0, QUERIES)
    column = block * SIZE + offset
    is_query = (offset < SIZE) & (column < length)
    q = _load(query + row * query_row + head * query_head, column, query_step, is_query, WIDTH, PADDED, UPCAST)
    key += row * key_row + (head // group_size) * key_head
    means += ((row * heads + head) * blocks + block) * blocks
    addresses = (row * heads + head) * columns + column
    LOG2E: tl.constexpr = 1.4426950408889634
    over_all = tl.load(lse + addresses, mask=is_query, other=0.0) * LOG2E
    addresses = ((row + rows) * heads + head) * columns + column
    over_answer = tl.load(lse + addresses, mask=is_query, other=0.0) * LOG2E
    num_queries = tl.minimum(SIZE, length - block * SIZE)
    for key_block in range(0, blocks):
        norm = tl.where(key_block < first, over_all, over_answer)
        mass = tl.zeros([QUERIES], tl.float32)
        for start in tl.static_range(0, SIZE, KEYS):
            offset_in_block = start + tl.arange(0, KEYS)
            position = key_block * SIZE + offset_in_block
            is_key = (offset_in_block < SIZE) & (position < length)
            k = _load(key, position, key_step, is_key, WIDTH, PADDED, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            weights = tl.exp2(scores - norm[:, None])
            mass += tl.sum(tl.where(is_key[None, :] & is_query[:, None], weights, 0.0), 1)
        area = tl.maximum(num_queries, 1) * tl.maximum(tl.minimum(SIZE, length - key_block * SIZE), 1)
        tl.store(means + key_block, tl.sum(mass, 0) / area.to(tl.float32))
