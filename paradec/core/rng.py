"""Counter-based random numbers: each depends only on (row key, step, position, stream, index of the draw). A repeated
step draws the same numbers, whatever the other rows, padding or device. Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
PAIR = np.array(MULTIPLIERS, np.uint64)
KEYS = np.multiply.outer(np.arange(10), WEYL).astype(np.uint32)
"""[10, 2]: added to the key in each round."""
LOWER_HALF = int(sys.byteorder == "big")
"""Index of the lower half of a 64-bit number."""
CALLS_IN_CACHE = 3 * 2**12
"""Number of philox calls that the CPU computes at a time, so that they fit into its cache."""

TOKEN_STREAM = 0
POSITION_STREAM = 1
"""Stream of the draws that choose positions; they do not depend on the draws of tokens."""


Integers = TypeVar("Integers", Tensor, np.ndarray)
"""[...] 32-bit values: int64 tensors, or uint64 arrays."""


def philox(counter: Sequence[Any], key: Sequence[Integers]) -> tuple[Integers, Integers, Integers, Integers]:
    """Compute ten rounds of Philox4x32 on broadcastable tensors or arrays; entries of the counter may be ints."""
    if isinstance(key[0], np.ndarray):
        return _philox_of_pairs(counter, key)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # signed products wrap modulo 2**64: they have the same bits as unsigned products
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # c1 and c3 need only the products' lower halves; the next round or the return masks the upper halves
        c0, c2 = ((second >> 32) ^ c1 ^ k0) & MASK32, ((first >> 32) ^ c3 ^ k1) & MASK32
        c1, c3 = second, first
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32


def _philox_of_pairs(counter: Sequence[Any], key: Sequence[np.ndarray]) -> tuple[Any, Any, Any, Any]:
    """Compute `philox` on arrays. Counter entries 0 and 2 are stacked, as are 1 and 3, which halves the numpy calls."""
    shape, narrow = np.broadcast(*counter, *key).shape, np.broadcast(*key).shape
    even, odd, mixed = np.empty((2, *shape), np.uint64), *np.empty((2, 2, *shape), np.uint32)
    even[0], odd[0], even[1], odd[1] = counter
    keys = np.empty((2, *[1] * (len(shape) - len(narrow)), *narrow), np.uint32)
    keys[0], keys[1] = key
    halves = even.view(np.uint32).reshape(*even.shape, 2)[::-1]  # of both products, swapped
    lower, upper = halves[..., LOWER_HALF], halves[..., 1 - LOWER_HALF]
    multipliers = PAIR.reshape(2, *[1] * len(shape))
    for key_of_round in keys + KEYS.reshape(10, 2, *[1] * len(shape)):
        even *= multipliers
        np.bitwise_xor(upper, odd, out=mixed)
        mixed ^= key_of_round
        odd[...] = lower
        even[...] = mixed
    first, third = odd.astype(np.uint64)
    return even[0], first, even[1], third


def uniform(keys: Tensor, step: Tensor, position: Tensor, size: int, stream: int | Tensor) -> Tensor:
    """Draw uniform float64 numbers in (0, 1) with 53 random bits: [R, W, size].

    keys: [R, 2] int64 row keys. position: [R, W] int64. step: [R] int64, or [R, W].
    size: draws per position (the vocabulary for Gumbel noise, 1 for a score).
    stream: a stream's number, such as `TOKEN_STREAM`; or [W] int64, one for each position."""
    rows, width = position.shape
    count = (size + 1) // 2
    step = step if step.ndim == 2 else step.unsqueeze(1)
    if keys.is_cpu:
        streams = stream.numpy() if isinstance(stream, Tensor) else stream
        parts_of_address = (position.numpy(), step.numpy(), *keys.numpy().T[:, :, None], streams)
        addresses = np.empty((5, rows, width), np.uint64)
        for index, numbers in enumerate(parts_of_address):
            addresses[index] = numbers
        draws = torch.from_numpy(_draw_on_cpu(addresses.reshape(5, -1, 1), count))
    else:
        parts = (position, step, *keys.T.unsqueeze(-1), *([stream] if isinstance(stream, Tensor) else []))
        columns: list[Any] = [part.expand(rows, width).reshape(-1, 1) for part in parts]
        columns += [] if isinstance(stream, Tensor) else [stream]  # stays an int: a copy would wait for the device
        bits = torch.stack(_draw_pairs(torch.arange(count, device=keys.device), columns), -1)
        draws = (bits.double() + 0.5) * 2.0**-53
    return draws.view(rows, width, 2 * count)[..., :size]


def _draw_pairs(calls: Integers, address: Sequence[Any]) -> tuple[Integers, Integers]:
    """Make two draws of 53 bits per philox call. address: position, step, the two numbers of the row key, stream."""
    position, step, key0, key1, stream = address
    a, b, c, d = philox((calls, position, step, stream), (key0, key1))
    return (a << 21) | (b >> 11), (c << 21) | (d >> 11)


def _draw_on_cpu(addresses: np.ndarray, count: int) -> np.ndarray:
    """Make draws [N, count, 2] for addresses [5, N, 1] (`_draw_pairs`), in pieces that fit into the CPU's cache."""
    draws = np.empty((addresses.shape[1], count, 2))
    width = min(max(count, 1), CALLS_IN_CACHE)
    height = CALLS_IN_CACHE // width
    for top, left in product(range(0, len(draws), height), range(0, count, width)):
        part = draws[top : top + height, left : left + width]
        calls = np.arange(left, left + part.shape[1], dtype=np.uint64)
        part[..., 0], part[..., 1] = _draw_pairs(calls, [*addresses[:, top : top + height]])
        part += 0.5
        part *= 2.0**-53
    return draws


def gumbel(noise: Tensor) -> Tensor:
    """Convert uniform draws in (0, 1) to standard Gumbel noise."""
    return noise.log().neg_().log_().neg_()
