"""Schedules: number of tokens to commit in a step, per row, on the host."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch


def linear(masks_at_open: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Compute LLaDA's linear schedule: equal counts, and one more in each of the first `masks_at_open % steps` steps.

    All [R] int64. masks_at_open: undecided positions when the block opened. step, steps: completed and planned steps.
    """
    steps = steps.clip(1)  # not np.maximum: the arguments may be tensors
    return masks_at_open // steps + (step < masks_at_open % steps)


@lru_cache(maxsize=64)
def _fractions(steps: int, eps: float) -> np.ndarray:
    # float32 as in Dream's code: truncation in `time_grid` depends on the last bit
    times = torch.linspace(1, eps, steps + 1)
    return (1 - times[1:] / times[:-1]).numpy()


def time_grid(remaining: np.ndarray, step: np.ndarray, steps: np.ndarray, eps: float) -> np.ndarray:
    """Compute Dream's schedule: a share 1 - s/t of a row's undecided positions, rounded down, where s follows t in
    linspace(1, eps, steps + 1); in the last step, all. (The public code takes the batch's mean number.)"""
    share = time_share(step, steps, eps)
    # float32 products as in Dream's code
    return np.where(step >= steps - 1, remaining, (remaining.astype(np.float32) * share).astype(np.int64))


def time_share(step: np.ndarray, steps: np.ndarray, eps: float) -> np.ndarray:
    """Compute the share 1 - s/t of masked positions that become final in each row's step (`time_grid`): [R] float32."""
    share = np.ones(len(step), dtype=np.float32)
    for planned in np.unique(steps):  # rows nearly always have equal plans
        is_early = (steps == planned) & (step < planned - 1)
        share[is_early] = _fractions(int(planned), eps)[step[is_early]]
    return share
