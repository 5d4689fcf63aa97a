"""Random tokens of a canvas."""

from __future__ import annotations

from torch import Tensor

from paradec.core import rng

FIRST_STREAM, NOISE_STREAM = 4, 5
"""Draws of the tokens that a canvas opens with, and of those that replace what a step does not keep.
(`paradec.core.rng` and `paradec.samplers.causal.base` have the other streams.)"""


def noise(keys: Tensor, step: Tensor, positions: Tensor, vocab: int, stream: int) -> Tensor:
    """[R, C] int64: a uniform token for each position. keys [R, 2], step [R], positions [R, C]: as in `rng.uniform`."""
    found = rng.uniform(keys, step, positions, 1, stream).squeeze(-1)
    return (found * vocab).long()
