"""Counter-based random numbers: a draw is a function of (row key, step, position, word), not of history.

So a step that is repeated draws the same numbers, and a row draws the same numbers whatever its neighbours, its
padding or the device. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

TOKEN_STREAM = 0
"""Draws that choose a token."""
POSITION_STREAM = 1
"""Draws that choose positions. A stream of its own: another temperature leaves the order alone."""


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32. All tensors int64 holding 32-bit values, broadcastable; so is the result."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves all 64 bits of the unsigned product in place
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & MASK32) ^ c1 ^ k0,
            second & MASK32,
            ((first >> 32) & MASK32) ^ c3 ^ k1,
            first & MASK32,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def row_keys(seeds: Sequence[int], prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, 2] int64: a 64-bit key per row from its seed, its prompt and how many equal rows stand before it.

    The row's index is left out on purpose: a row keeps its numbers when the batch around it changes, while copies of
    one prompt still differ from each other.
    """
    copies: dict[tuple[int, tuple[int, ...]], int] = {}
    keys = []
    for seed, prompt in zip(seeds, prompts, strict=True):
        identity = (int(seed), tuple(prompt))
        copy = copies[identity] = copies.get(identity, -1) + 1
        text = np.asarray([seed, copy, *prompt], dtype=np.int64).tobytes()
        keys.append(np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype="<u4").astype(np.int64))
    return np.stack(keys)


def uniform(keys: Tensor, step: Tensor, position: Tensor, words: int, stream: int) -> Tensor:
    """Uniform float64 draws in (0, 1) with 53 random bits.

    Args:
        keys: [R, 2] int64 row keys.
        step: [R] int64 steps of the rows.
        position: [R, W] int64 positions.
        words: how many draws per position (the vocabulary for Gumbel noise, 1 for a score).
        stream: `TOKEN_STREAM` or `POSITION_STREAM`.

    Returns:
        [R, W, words] float64.
    """
    # one call of philox gives four 32-bit words: two draws
    pairs = torch.arange((words + 1) // 2, device=keys.device)
    counter = (
        pairs.view(1, 1, -1),
        position.unsqueeze(-1),
        step.view(-1, 1, 1),
        torch.full_like(pairs[:1], stream).view(1, 1, 1),
    )
    a, b, c, d = philox(counter, (keys[:, 0].view(-1, 1, 1), keys[:, 1].view(-1, 1, 1)))
    high = torch.stack((a, c), dim=-1).flatten(-2)
    low = torch.stack((b, d), dim=-1).flatten(-2)
    bits = (high << 21) | (low >> 11)  # 53 bits
    return ((bits.double() + 0.5) * 2.0**-53)[..., :words]


def gumbel(noise: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform draws in (0, 1)."""
    return -torch.log(-torch.log(noise))
