"""Metrics of a comparison: confidence intervals of shares and means, and the area under an accuracy curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist

import numpy as np

from paradec.core.checks import check_int, check_number

LARGEST_LOSS = 5.0
"""The area leaves out settings whose accuracy is more than this many points below that of the slowest setting."""
NUM_RESAMPLES = 10_000
"""Number of resamples of a bootstrap."""
DECAY = 3.0
"""Exponential rate at which an accuracy's weight falls with its relative distance to the best accuracy."""


def wilson(right: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's score interval of a share (E. B. Wilson, JASA 22, 1927). It stays inside [0, 1].

    right: successes, in [0, trials]. trials: independent trials, at least 1. confidence: coverage, in (0, 1).
    Returns (low, high), shares in [0, 1]. Raises ValueError: an argument out of its range."""
    check_int("trials", trials, low=1)
    check_int("right", right, low=0, high=trials)
    check_number("confidence", confidence, low=0, high=1, open_low=True)
    if confidence == 1:
        raise ValueError("confidence=1 must be less than 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = right / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # at the shares 0 and 1, one bound is exactly the share
    return (0.0 if right == 0 else centre - half), (1.0 if right == trials else centre + half)


def aup(points: Iterable[tuple[float, float]], best: float | None = None) -> float:
    """Compute the area under one method's accuracy-parallelism curve, in percentage points times tokens per forward
    (AUP of d3LLM, hao-ai-lab).

    Settings are sorted by parallelism, rho_1 <= rho_2 <= ..., with accuracies y_1, y_2, ... in per cent. Settings more
    than 5 points below y_1 are left out. The area is

        rho_1 y_1 + sum over i > 1 of (rho_i - rho_(i-1)) (y_i w_i + y_(i-1) w_(i-1)) / 2

    with w_i = min(exp(-3 (1 - y_i / best)), 1).

    points: (tokens per forward > 0, accuracy in per cent) of each setting, at least one.
    best: the best accuracy of any method, in per cent; by default the best in `points`.
    Raises ValueError: no points, or a number out of its range."""
    ordered = sorted(points)
    if not ordered:
        raise ValueError("points is empty; the area needs the settings of a method, at least one")
    for rho, accuracy in ordered:
        check_number("tokens per forward", rho, low=0, open_low=True)
        check_number("accuracy", accuracy, low=0, high=100)
    check_number("best", best, low=0, high=100, none=True)
    best = max(accuracy for _, accuracy in ordered) if best is None else best
    if best == 0:
        return 0.0  # nothing was ever right
    slowest = ordered[0][1]
    points_used = [(rho, accuracy) for rho, accuracy in ordered if accuracy >= slowest - LARGEST_LOSS]
    weighted = [accuracy * min(math.exp(-DECAY * (1 - accuracy / best)), 1.0) for _, accuracy in points_used]
    area = points_used[0][0] * slowest
    for k in range(1, len(points_used)):
        area += (points_used[k][0] - points_used[k - 1][0]) * (weighted[k] + weighted[k - 1]) / 2
    return area


def bootstrap(values: Sequence[float], groups: Sequence[str] | None = None, seed: int = 0) -> tuple[float, float]:
    """Compute the 95 % interval (low, high) of the mean of `values`, by a percentile bootstrap over groups. groups: a
    name for each value; None: each value is a group. Raises ValueError: no values."""
    if not len(values):
        raise ValueError("values is empty; give at least one number")
    groups = [str(index) for index in range(len(values))] if groups is None else groups
    index_of = {name: index for index, name in enumerate(dict.fromkeys(groups))}
    group_indices = np.array([index_of[name] for name in groups])
    sums, sizes = np.bincount(group_indices, np.asarray(values, np.float64)), np.bincount(group_indices)
    resamples = np.random.default_rng(seed).integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    low, high = np.quantile(sums[resamples].sum(1) / sizes[resamples].sum(1), (0.025, 0.975))
    return float(low), float(high)
