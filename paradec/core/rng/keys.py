"""A row's key: what all of its random numbers follow from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def row_keys(seeds: Sequence[int], prompts: Sequence[Sequence[int]], before: Sequence[int] | None = None) -> np.ndarray:
    """[B, 2] int64: a 64-bit key per row from its seed, its prompt and how many equal rows are before it.

    `before` says how many those are, where rows of other batches count as well.

    The row's index is left out on purpose: a row keeps its numbers when the batch around it changes, while copies of
    one prompt still differ from each other.
    """
    copies: dict[tuple[int, tuple[int, ...]], int] = {}
    keys = []
    for row, (seed, prompt) in enumerate(zip(seeds, prompts, strict=True)):
        identity = (int(seed), tuple(prompt))
        copy = copies[identity] = copies.get(identity, -1) + 1
        if before is not None:
            copy = before[row]
        text = np.asarray([seed, copy, *prompt], dtype=np.int64).tobytes()
        keys.append(np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype="<u4").astype(np.int64))
    return np.stack(keys)
