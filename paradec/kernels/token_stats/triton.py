"""The "triton" path: one kernel that reads every logit once, and a small one that joins the parts of a row where the
vocabulary was split over programs. Imports triton, and so is itself imported where this path is first taken.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from paradec.kernels.token_stats.reference import GumbelDraws, TokenStats

BLOCK = 2048
"""Tokens that a Triton program works on at a time: eight a thread, which leaves registers for four programs."""
FLOATS = ("prob", "second_prob", "margin", "entropy", "logsumexp", "gap", "sample_prob")
"""Rows of `floats` in the kernel, in order."""
PARTIAL = 7
"""Numbers per part of a row: m, second, best, rest, weight; best perturbed logit, less m, and its token."""


def triton_stats(
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float,
    ids: Tensor | None,
    draws: GumbelDraws | None,
    block: int = BLOCK,
    splits: int | None = None,
) -> TokenStats:
    """`token_stats`, unchecked. block: tokens per tile, a power of two. splits: parts of the vocabulary; None fits the
    device."""
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    grid = logits if logits.dim() == 3 else logits.reshape(1, -1, vocab)  # [R, W, V]; three dimensions need no copy
    if grid.stride(2) != 1:
        grid = grid.contiguous()
    count, width, device = grid.shape[0] * grid.shape[1], grid.shape[1], logits.device
    if splits is None:
        splits = max(1, min(_programs(device) // max(count, 1), triton.cdiv(vocab, block)))
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
    noise: tuple[Tensor | None, ...] = (None, None, None)
    sharpness = None
    if draws is not None:
        noise = tuple(own.contiguous() for own in draws.by_row())
        # a tensor: as an argument of the kernel it would be rounded to float32
        sharpness = torch.full((1,), draws.temperature, dtype=torch.float64, device=device)
    if count:
        _partial_kernel[(count, splits)](
            grid, partial, *noise, sharpness, width, grid.stride(0), grid.stride(1), vocab, span, 1 / temperature,
            SAMPLE=draws is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
        many = 0 if flat_ids is None else flat_ids.shape[1]
        _finish_kernel[(count,)](
            grid, partial, floats, tokens, nonfinite, flat_ids, ids_prob, sharpness,
            count, splits, width, grid.stride(0), grid.stride(1), temperature, many,
            SAMPLE=draws is not None, IDS=triton.next_power_of_2(many) if many else 0, num_warps=1,
        )  # fmt: skip
    numbers = dict(zip(FLOATS, floats.view(len(FLOATS), *lead).unbind(0), strict=True))
    sample_prob = numbers.pop("sample_prob")
    return TokenStats(
        token=tokens[0].view(lead),
        nonfinite=nonfinite.view(lead),
        ids_prob=None if ids_prob is None or ids is None else ids_prob.view(ids.shape),
        sample=None if draws is None else tokens[1].view(lead),
        sample_prob=None if draws is None else sample_prob,
        **numbers,
    )


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs a device holds at once: four per multiprocessor, by the kernel's registers."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _partial_kernel(
    logits, partial, keys, steps, positions, sharpness, width, row_stride, column_stride, vocab, span, scale,
    SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one row's vocabulary -> partial [N, splits, 7] float64. Grid (N, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    source = logits + (row // width) * row_stride + (row % width) * column_stride
    begin = split * span
    stop = tl.minimum(begin + span, vocab)
    m = tl.full((), float("-inf"), tl.float32)
    second = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), -1, tl.int32)
    # lane by lane, summed at the end; the scalars hold tokens that were the best once
    rest = tl.zeros((BLOCK,), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    rest_of_best = tl.full((), 0.0, tl.float32)
    weight_of_best = tl.full((), 0.0, tl.float32)
    drawn = tl.full((), float("-inf"), tl.float64)
    sample = tl.full((), 0, tl.int32)
    lane = tl.arange(0, BLOCK)
    ahead = tl.load(source + begin + lane, mask=begin + lane < stop, other=float("-inf"))
    for at in range(begin, stop, BLOCK):
        token = at + lane
        # float32 at once: the interpreter computes nothing in bfloat16
        x = ahead.to(tl.float32)
        # the next tile is on its way while this one is worked on
        ahead = tl.load(source + token + BLOCK, mask=token + BLOCK < stop, other=float("-inf"))
        top = tl.max(x, 0)
        if top > second:  # few tiles hold one of the two best so far
            where = tl.min(tl.where(x == top, token, vocab), 0)
            other = tl.max(tl.where(token == where, float("-inf"), x), 0)
            if top > m:
                second = tl.maximum(m, other)
                if m > float("-inf"):
                    # finite, so that 0 times it is 0
                    shift = tl.maximum((m - top) * scale, -200.0)
                    factor = tl.exp(shift)
                    weight = factor * (weight + rest * shift)
                    rest = factor * rest
                    weight_of_best = factor * (weight_of_best + (rest_of_best + 1) * shift)
                    rest_of_best = factor * (rest_of_best + 1)
                    if SAMPLE:
                        drawn += (m.to(tl.float64) - top.to(tl.float64)) / tl.load(sharpness)
                m = top
                best = where
            else:
                second = top
        reference = tl.where(m == float("-inf"), 0.0, m)
        apart = (x - reference) * scale
        share = tl.where(token == best, 0.0, tl.exp(apart))
        rest += share
        weight += share * tl.maximum(apart, -200.0)
        if SAMPLE:
            seed = (tl.load(keys + 2 * row + 1) << 32) | tl.load(keys + 2 * row)
            flat = token * 0
            position = (flat + tl.load(positions + row)).to(tl.int32)
            step = (flat + tl.load(steps + row)).to(tl.int32)
            # two tokens share one call of Philox, as in rng.uniform; its stream 0 is the one that draws tokens
            a, b, c, d = tl.philox(seed, token // 2, position, step, flat)
            high = tl.where(token % 2 == 0, a, c).to(tl.int64)
            low = tl.where(token % 2 == 0, b, d).to(tl.int64)
            uniform = (((high << 21) | (low >> 11)).to(tl.float64) + 0.5) * 1.1102230246251565e-16
            gumbel = -tl.log(-tl.log(uniform))
            # less the largest logit so far, which would take the noise's digits
            below = (x.to(tl.float64) - reference.to(tl.float64)) / tl.load(sharpness)
            z = tl.where(token < stop, below + gumbel, float("-inf"))
            highest = tl.max(z, 0)
            if highest > drawn:
                drawn = highest
                sample = tl.min(tl.where(z == highest, token, vocab), 0)
    out = partial + (row * tl.num_programs(1) + split) * 7
    tl.store(out, m.to(tl.float64))
    tl.store(out + 1, second.to(tl.float64))
    tl.store(out + 2, best.to(tl.float64))
    tl.store(out + 3, (tl.sum(rest, 0) + rest_of_best).to(tl.float64))
    tl.store(out + 4, (tl.sum(weight, 0) + weight_of_best).to(tl.float64))
    tl.store(out + 5, drawn)
    tl.store(out + 6, sample.to(tl.float64))


@triton.jit
def _finish_kernel(
    logits, partial, floats, tokens, nonfinite, ids, ids_prob, sharpness,
    count, splits, width, row_stride, column_stride, temperature, many,
    SAMPLE: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, and write what follows from them. Grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + (row // width) * row_stride + (row % width) * column_stride
    none = float("-inf")
    m = tl.full((), none, tl.float64)
    second = tl.full((), none, tl.float64)
    best = tl.full((), 0.0, tl.float64)
    rest = tl.full((), 0.0, tl.float64)
    weight = tl.full((), 0.0, tl.float64)
    drawn = tl.full((), none, tl.float64)
    sample = tl.full((), 0.0, tl.float64)
    for split in range(0, splits):
        part = partial + (row * splits + split) * 7
        m2 = tl.load(part)
        second2 = tl.load(part + 1)
        best2 = tl.load(part + 2)
        rest2 = tl.load(part + 3)
        weight2 = tl.load(part + 4)
        top = tl.maximum(m, m2)
        # how far each side is below the larger maximum; a side without tokens weighs nothing
        down = tl.where(m == none, 0.0, (m - top) / temperature)
        down2 = tl.where(m2 == none, 0.0, (m2 - top) / temperature)
        factor = tl.where(m == none, 0.0, tl.exp(down))
        factor2 = tl.where(m2 == none, 0.0, tl.exp(down2))
        stays = m >= m2  # equal maxima: the lower tokens stay
        # the side that loses puts its best token among the others
        mass = rest + tl.where(stays | (m == none), 0.0, 1.0)
        mass2 = rest2 + tl.where(stays & (m2 > none), 1.0, 0.0)
        weight = factor * (weight + mass * down) + factor2 * (weight2 + mass2 * down2)
        rest = factor * mass + factor2 * mass2
        second = tl.maximum(tl.minimum(m, m2), tl.maximum(second, second2))
        best = tl.where(stays, best, best2)
        if SAMPLE:
            drawn += tl.where(m == none, 0.0, (m - top) / tl.load(sharpness))
            drawn2 = tl.load(part + 5) + tl.where(m2 == none, 0.0, (m2 - top) / tl.load(sharpness))
            sample = tl.where(drawn2 > drawn, tl.load(part + 6), sample)
            drawn = tl.maximum(drawn, drawn2)
        m = top
    bad = (m == none) | (m == float("inf")) | (rest != rest)
    safe = tl.where(bad, 0.0, m)
    total = tl.where(bad, float("nan"), 1.0 + rest)
    # ln(1 + rest) where 1 + rest rounds most of it away
    logarithm = tl.where(rest < 1e-5, rest - 0.5 * rest * rest, tl.log(total))
    ratio = tl.where(second == none, 0.0, tl.exp((second - safe) / temperature))
    tl.store(floats + row, 1.0 / total)
    tl.store(floats + count + row, ratio / total)
    tl.store(floats + 2 * count + row, (1.0 - ratio) / total)
    tl.store(floats + 3 * count + row, logarithm - weight / total)
    tl.store(floats + 4 * count + row, tl.where(bad, float("nan"), safe / temperature + logarithm))
    tl.store(floats + 5 * count + row, tl.where(bad, float("nan"), safe - second))
    tl.store(tokens + row, tl.maximum(best, 0.0).to(tl.int64))
    tl.store(nonfinite + row, bad)
    if SAMPLE:
        x = tl.load(source + sample.to(tl.int64)).to(tl.float32).to(tl.float64)
        tl.store(tokens + count + row, sample.to(tl.int64))
        tl.store(floats + 6 * count + row, tl.exp((x - safe) / temperature) / total)
    if IDS:
        k = tl.arange(0, IDS)
        token = tl.load(ids + row * many + k, mask=k < many, other=0)
        x = tl.load(source + token, mask=k < many, other=none).to(tl.float32).to(tl.float64)
        tl.store(ids_prob + row * many + k, tl.exp((x - safe) / temperature) / total, mask=k < many)
