"""Random numbers of a key, a step, a position and a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
CACHED = 3 * 2**12
"""Calls of philox at once on the CPU."""

TOKEN_STREAM = 0
"""Draws that choose a token."""
POSITION_STREAM = 1
"""Draws that choose positions. A stream of its own: another temperature leaves the order alone."""


Integers = TypeVar("Integers", Tensor, np.ndarray)
"""[...] 32-bit values: int64 tensors, or uint64 arrays."""


def philox(counter: Sequence[Any], key: Sequence[Integers]) -> tuple[Integers, Integers, Integers, Integers]:
    """Ten rounds of Philox4x32. What it is given is broadcastable, all tensors or all arrays, but that a number of the
    counter may be a plain number; so is the result."""
    if isinstance(key[0], np.ndarray):
        return _philox_of_pairs(counter, key)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # products wrap modulo 2**64, which leaves all 64 bits of the unsigned product in place
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # c1 and c3 are the products' lower halves; their upper ones go with those of the next round, or at the end
        c0, c2 = ((second >> 32) ^ c1 ^ k0) & MASK32, ((first >> 32) ^ c3 ^ k1) & MASK32
        c1, c3 = second, first
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32


def _philox_of_pairs(counter: Sequence[Any], key: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any]:
    """The same of arrays. Entries 0 and 2 of the counter take the same steps, and so do 1 and 3: pairs of them are half
    as many calls, which is what few numbers cost."""
    shape, narrow = np.broadcast(*counter, *key).shape, np.broadcast(*key).shape
    even, odd = np.empty((2, 2, *shape), np.uint64)
    even[0], odd[0], even[1], odd[1] = counter
    keys = np.empty((2, *[1] * (len(shape) - len(narrow)), *narrow), np.uint64)
    keys[0], keys[1] = key
    multiplier, weyl = (np.array(pair, np.uint64).reshape(2, *[1] * len(shape)) for pair in (MULTIPLIERS, WEYL))
    upper, mask = np.uint64(32), np.uint64(MASK32)
    for key_of_round in (keys + np.multiply.outer(np.arange(10, dtype=np.uint64), weyl)) & mask:
        product = (even * multiplier)[::-1]
        even = product >> upper
        even ^= odd
        even ^= key_of_round
        even &= mask
        odd = product
    odd &= mask
    return even[0], odd[0], even[1], odd[1]


def uniform(keys: Tensor, step: Tensor, position: Tensor, size: int, stream: int) -> Tensor:
    """Uniform float64 draws in (0, 1) with 53 random bits.

    Args:
        keys: [R, 2] int64 row keys.
        step: [R] int64 steps of the rows.
        position: [R, W] int64 positions.
        size: how many draws per position (the vocabulary for Gumbel noise, 1 for a score).
        stream: `TOKEN_STREAM` or `POSITION_STREAM`.

    Returns:
        [R, W, size] float64.
    """
    rows, width = position.shape
    count = (size + 1) // 2
    if keys.is_cpu:
        each = (position.numpy(), step.numpy()[:, None], *keys.numpy().T[:, :, None])
        host = np.empty((4, rows, width), np.uint64)
        for index, numbers in enumerate(each):
            host[index] = numbers
        draws = torch.from_numpy(_on_host(host.reshape(4, -1, 1), count, stream))
    else:
        wide = (position, step.unsqueeze(1), *keys.T.unsqueeze(-1))
        place = [part.expand(rows, width).reshape(-1, 1) for part in wide]
        bits = torch.stack(_bits(torch.arange(count, device=keys.device), place, stream), -1)
        draws = (bits.double() + 0.5) * 2.0**-53
    return draws.view(rows, width, 2 * count)[..., :size]


def _bits(calls: Integers, place: Sequence[Integers], stream: int) -> tuple[Integers, Integers]:
    """Two draws of 53 bits per call; one of philox gives four 32-bit words. place: position, step and both keys."""
    position, step, key0, key1 = place
    a, b, c, d = philox((calls, position, step, stream), (key0, key1))
    return (a << 21) | (b >> 11), (c << 21) | (d >> 11)


def _on_host(place: np.ndarray, count: int, stream: int) -> np.ndarray:
    """Draws [N, count, 2] of N places; in pieces that stay in the processor's cache, which is several times faster."""
    position, step, key0, key1 = place
    draws = np.empty((len(position), count, 2))
    wide = min(max(count, 1), CACHED)
    tall = CACHED // wide
    for top, left in product(range(0, len(draws), tall), range(0, count, wide)):
        part, rows = draws[top : top + tall, left : left + wide], slice(top, top + tall)
        calls = np.arange(left, left + part.shape[1], dtype=np.uint64)
        part[..., 0], part[..., 1] = _bits(calls, (position[rows], step[rows], key0[rows], key1[rows]), stream)
        part += 0.5
        part *= 2.0**-53
    return draws


def gumbel(noise: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform draws in (0, 1)."""
    return noise.log().neg_().log_().neg_()
