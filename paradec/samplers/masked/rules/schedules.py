"""Schedules: tokens to commit at a step, per row, on the host."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch


def linear(masks_at_open: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """LLaDA's linear schedule: equal counts, the first `masks % steps` steps one more. All arrays: [R] int64.

    masks_at_open: undecided positions when the block opened. step, steps: steps taken in the block, and planned for it.
    """
    steps = steps.clip(1)  # tensors have it, too
    return masks_at_open // steps + (step < masks_at_open % steps)


@lru_cache(maxsize=64)
def _fractions(steps: int, eps: float) -> np.ndarray:
    # in float32, as the reference: int() of the products below depends on the last bit
    times = torch.linspace(1, eps, steps + 1)
    return (1 - times[1:] / times[:-1]).numpy()


def time_grid(remaining: np.ndarray, step: np.ndarray, steps: np.ndarray, eps: float) -> np.ndarray:
    """Dream's schedule: a share 1 - s/t of the undecided positions, truncated, on t = linspace(1, eps, steps + 1); the
    last step takes everything. Counted per row (the reference takes the batch's mean)."""
    share = time_share(step, steps, eps)
    # float32 products, as the reference's tensors make them
    return np.where(step >= steps - 1, remaining, (remaining.astype(np.float32) * share).astype(np.int64))


def time_share(step: np.ndarray, steps: np.ndarray, eps: float) -> np.ndarray:
    """[R] float32: 1 - s/t of each row's step, the probability that a masked position becomes final in it."""
    share = np.ones(len(step), dtype=np.float32)
    for planned in np.unique(steps):  # rows nearly always share one plan
        is_early = (steps == planned) & (step < planned - 1)
        share[is_early] = _fractions(int(planned), eps)[step[is_early]]
    return share
