"""The "triton" path: a kernel that reads every logit once, and a kernel that merges a row's parts. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradec.kernels.token_stats.draws import SEGMENT, TokenDraws
from paradec.kernels.token_stats.reference import TokenStats

BLOCK = 2048
"""Tokens per program step: eight per thread, so that registers suffice for four programs per multiprocessor."""
FLOATS = ("prob", "second_prob", "margin", "entropy", "logsumexp", "gap", "sample_prob")
"""Order of the fields in the kernel's output `floats`."""
PARTIAL = 5
"""Numbers per part of a row: largest and second largest logit, best token, sum, weighted sum."""


def triton_stats(
    logits: Tensor,
    fields: frozenset[str],
    temperature: float,
    ids: Tensor | None,
    draws: TokenDraws | None,
    block: int = BLOCK,
    splits: int | None = None,
) -> TokenStats:
    """Compute `token_stats` without checks. block: tokens per tile, a power of two. splits: number of parts of the
    vocabulary; None: as many as the device runs at once."""
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    table = logits if logits.dim() == 3 else logits.reshape(1, -1, vocab)  # [R, W, V]; three dimensions need no copy
    if table.stride(2) != 1:
        table = table.contiguous()
    count, width, device = table.shape[0] * table.shape[1], table.shape[1], logits.device
    if splits is None:
        # programs that a device holds at once: four per multiprocessor, by the kernel's registers
        cuda = device.type == "cuda"
        programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        splits = max(1, min(programs // max(count, 1), triton.cdiv(vocab, block)))
    span = triton.cdiv(triton.cdiv(vocab, splits), block) * block
    splits = triton.cdiv(vocab, span)
    partial = torch.empty((count, splits, PARTIAL), dtype=torch.float64, device=device)
    floats = torch.empty((len(FLOATS), count), dtype=torch.float64, device=device)
    tokens = torch.empty((2, count), dtype=torch.int64, device=device)
    nonfinite = torch.empty(count, dtype=torch.bool, device=device)
    flat_ids = ids_prob = None
    if ids is not None:
        flat_ids = ids.reshape(count, -1).contiguous()
        ids_prob = torch.empty(flat_ids.shape, dtype=torch.float64, device=device)
    segment, num_segments = min(SEGMENT, block), splits * span // min(SEGMENT, block)
    sums = tops = uniform = draw_temperature = None
    if draws is not None:
        uniform = draws.uniform().reshape(count).contiguous()
        # in a tensor, because a scalar argument of a kernel is rounded to float32
        draw_temperature = torch.full((1,), draws.temperature, dtype=torch.float64, device=device)
        sums = torch.empty((count, num_segments), dtype=torch.float32, device=device)
        tops = torch.empty_like(sums)  # the maximum that a segment's exponents refer to
    if count:
        _partial_kernel[(count, splits)](
            table, partial, sums, tops, draw_temperature, width, table.stride(0), table.stride(1), vocab, span,
            1 / temperature, SAMPLE=draws is not None, BLOCK=block, SEGMENT=segment, num_warps=8,
        )  # fmt: skip
        num_ids = 0 if flat_ids is None else flat_ids.shape[1]
        _finish_kernel[(count,)](
            table, partial, floats, tokens, nonfinite, flat_ids, ids_prob, sums, tops, uniform, draw_temperature,
            count, splits, width, table.stride(0), table.stride(1), vocab, num_segments, temperature, num_ids,
            SAMPLE=draws is not None, IDS=triton.next_power_of_2(num_ids) if num_ids else 0,
            SEGMENT=segment, PADDED_SEGMENTS=triton.next_power_of_2(num_segments), num_warps=1,
        )  # fmt: skip
    values = dict(zip(FLOATS, floats.view(len(FLOATS), *lead).unbind(0), strict=True))
    sample_prob = values.pop("sample_prob")
    return TokenStats(
        token=tokens[0].view(lead),
        nonfinite=nonfinite.view(lead),
        ids_prob=None if ids_prob is None or ids is None else ids_prob.view(ids.shape),
        sample=None if draws is None else tokens[1].view(lead),
        sample_prob=None if draws is None else sample_prob,
        **values,
    )


@triton.jit
def _partial_kernel(
    logits, partial, sums, tops, draw_temperature, width, row_stride, column_stride, vocab, span, scale,
    SAMPLE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Reduce one part of a row's vocabulary into partial [N, splits, 5] float64, for N rows. Grid (N, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    source = logits + (row // width) * row_stride + (row % width) * column_stride
    begin = split * span
    stop = tl.minimum(begin + span, vocab)
    m = tl.full((), float("-inf"), tl.float32)
    second = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), -1, tl.int32)
    # lane_* leave out the best token so far; former_* hold the tokens that were the best earlier
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    lane_weight = tl.zeros((BLOCK,), tl.float32)
    former_sum = tl.full((), 0.0, tl.float32)
    former_weight = tl.full((), 0.0, tl.float32)
    lane = tl.arange(0, BLOCK)
    next_tile = tl.load(source + begin + lane, mask=begin + lane < stop, other=float("-inf"))
    for tile_start in range(begin, stop, BLOCK):
        token = tile_start + lane
        # convert to float32 first: the interpreter cannot compute in bfloat16
        x = next_tile.to(tl.float32)
        # prefetch the next tile
        next_tile = tl.load(source + token + BLOCK, mask=token + BLOCK < stop, other=float("-inf"))
        top = tl.max(x, 0)
        if top > second:  # few tiles hold a new best or second best token
            top_token = tl.min(tl.where(x == top, token, vocab), 0)
            runner_up = tl.max(tl.where(token == top_token, float("-inf"), x), 0)
            if top > m:
                second = tl.maximum(m, runner_up)
                if m > float("-inf"):
                    # finite, because 0 * -inf is NaN
                    shift = tl.maximum((m - top) * scale, -200.0)
                    factor = tl.exp(shift)
                    lane_weight = factor * (lane_weight + lane_sum * shift)
                    lane_sum = factor * lane_sum
                    former_weight = factor * (former_weight + (former_sum + 1) * shift)
                    former_sum = factor * (former_sum + 1)
                m = top
                best = top_token
            else:
                second = top
        reference = tl.where(m == float("-inf"), 0.0, m)
        difference = (x - reference) * scale
        exponential = tl.where(token == best, 0.0, tl.exp(difference))
        lane_sum += exponential
        lane_weight += exponential * tl.maximum(difference, -200.0)
        if SAMPLE:
            exponent = (x.to(tl.float64) - reference.to(tl.float64)) / tl.load(draw_temperature)
            draw_weights = tl.where(x == float("-inf"), 0.0, tl.exp(exponent.to(tl.float32)))
            segments = tl.arange(0, BLOCK // SEGMENT)
            segment_index = row * (tl.num_programs(1) * span // SEGMENT) + tile_start // SEGMENT + segments
            tl.store(sums + segment_index, tl.sum(tl.reshape(draw_weights, (BLOCK // SEGMENT, SEGMENT)), 1))
            tl.store(tops + segment_index, (segments * 0).to(tl.float32) + reference)
    output = partial + (row * tl.num_programs(1) + split) * 5
    tl.store(output, m.to(tl.float64))
    tl.store(output + 1, second.to(tl.float64))
    tl.store(output + 2, best.to(tl.float64))
    tl.store(output + 3, (tl.sum(lane_sum, 0) + former_sum).to(tl.float64))
    tl.store(output + 4, (tl.sum(lane_weight, 0) + former_weight).to(tl.float64))


@triton.jit
def _draw_index(weights, index, uniform):
    """Draw an entry of `index` with the number `uniform`, never an entry of weight 0. Also return, for the next draw,
    where the number lies within the entry's weight, in [0, 1)."""
    cumulative = tl.cumsum(weights, 0)
    target = tl.minimum(uniform, 0.9999999999999999) * tl.sum(weights, 0)
    has_weight = weights > 0
    last = tl.max(tl.where(has_weight, index, 0), 0)
    hit = tl.minimum(tl.min(tl.where(has_weight & (cumulative > target), index, 2147483647), 0), last)
    hit_weight = tl.sum(tl.where(index == hit, weights, 0.0), 0)
    previous_sum = tl.sum(tl.where(index == hit, cumulative, 0.0), 0) - hit_weight
    fraction = tl.where(hit_weight > 0, (target - previous_sum) / hit_weight, 0.0)
    return hit, tl.minimum(tl.maximum(fraction, 0.0), 0.9999999999999999)


@triton.jit
def _finish_kernel(
    logits, partial, floats, tokens, nonfinite, ids, ids_prob, sums, tops, uniform, draw_temperature,
    count, splits, width, row_stride, column_stride, vocab, num_segments, temperature, num_ids,
    SAMPLE: tl.constexpr, IDS: tl.constexpr, SEGMENT: tl.constexpr, PADDED_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a row. Grid (N,), for N rows."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + (row // width) * row_stride + (row % width) * column_stride
    minus_inf = float("-inf")
    m = tl.full((), minus_inf, tl.float64)
    second = tl.full((), minus_inf, tl.float64)
    best = tl.full((), 0.0, tl.float64)
    exp_sum = tl.full((), 0.0, tl.float64)
    weight = tl.full((), 0.0, tl.float64)
    for split in range(0, splits):
        base = partial + (row * splits + split) * 5
        m2 = tl.load(base)
        second2 = tl.load(base + 1)
        best2 = tl.load(base + 2)
        exp_sum2 = tl.load(base + 3)
        weight2 = tl.load(base + 4)
        top = tl.maximum(m, m2)
        # distances to the larger maximum; a part without tokens weighs nothing
        down = tl.where(m == minus_inf, 0.0, (m - top) / temperature)
        down2 = tl.where(m2 == minus_inf, 0.0, (m2 - top) / temperature)
        factor = tl.where(m == minus_inf, 0.0, tl.exp(down))
        factor2 = tl.where(m2 == minus_inf, 0.0, tl.exp(down2))
        keeps_best = m >= m2  # equal maxima: the lower tokens stay
        # the best token of the part with the smaller maximum is added to that part's sum
        mass = exp_sum + tl.where(keeps_best | (m == minus_inf), 0.0, 1.0)
        mass2 = exp_sum2 + tl.where(keeps_best & (m2 > minus_inf), 1.0, 0.0)
        weight = factor * (weight + mass * down) + factor2 * (weight2 + mass2 * down2)
        exp_sum = factor * mass + factor2 * mass2
        second = tl.maximum(tl.minimum(m, m2), tl.maximum(second, second2))
        best = tl.where(keeps_best, best, best2)
        m = top
    is_invalid = (m == minus_inf) | (m == float("inf")) | (exp_sum != exp_sum)
    peak = tl.where(is_invalid, 0.0, m)
    total = tl.where(is_invalid, float("nan"), 1.0 + exp_sum)
    # ln(1 + exp_sum): for a small exp_sum use the series, because 1 + exp_sum would round its digits away
    logarithm = tl.where(exp_sum < 1e-5, exp_sum - 0.5 * exp_sum * exp_sum, tl.log(total))
    ratio = tl.where(second == minus_inf, 0.0, tl.exp((second - peak) / temperature))
    tl.store(floats + row, 1.0 / total)
    tl.store(floats + count + row, ratio / total)
    tl.store(floats + 2 * count + row, (1.0 - ratio) / total)
    tl.store(floats + 3 * count + row, logarithm - weight / total)
    tl.store(floats + 4 * count + row, tl.where(is_invalid, float("nan"), peak / temperature + logarithm))
    tl.store(floats + 5 * count + row, tl.where(is_invalid, float("nan"), peak - second))
    tl.store(tokens + row, tl.maximum(best, 0.0).to(tl.int64))
    tl.store(nonfinite + row, is_invalid)
    if SAMPLE:
        # draw a segment, then a token of it, as in draws.py
        t = tl.load(draw_temperature)
        index = tl.arange(0, PADDED_SEGMENTS)
        is_segment = index * SEGMENT < vocab  # `sums` is not written past the end of the vocabulary
        weights = tl.load(sums + row * num_segments + index, mask=is_segment, other=0.0).to(tl.float64)
        exponent = (tl.load(tops + row * num_segments + index, mask=is_segment, other=0.0).to(tl.float64) - peak) / t
        weights = tl.where(weights > 0, weights * tl.exp(tl.minimum(exponent, 0.0)), 0.0)
        segment, fraction = _draw_index(weights, index, tl.load(uniform + row))
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        x = tl.load(source + token, mask=token < vocab, other=minus_inf).to(tl.float32).to(tl.float64)
        weights = tl.where(x == minus_inf, 0.0, tl.exp((x - peak) / t))
        sample, fraction = _draw_index(weights, token, fraction)
        x = tl.load(source + sample).to(tl.float32).to(tl.float64)
        tl.store(tokens + count + row, sample.to(tl.int64))
        tl.store(floats + 6 * count + row, tl.exp((x - peak) / temperature) / total)
    if IDS:
        k = tl.arange(0, IDS)
        token = tl.load(ids + row * num_ids + k, mask=k < num_ids, other=0)
        x = tl.load(source + token, mask=k < num_ids, other=minus_inf).to(tl.float32).to(tl.float64)
        tl.store(ids_prob + row * num_ids + k, tl.exp((x - peak) / temperature) / total, mask=k < num_ids)
