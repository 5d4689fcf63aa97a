"""Successive halving for several objectives: which trials continue with more prompts.

A trial measures one setting, rung by rung, on prompts of the half that serves to choose settings: first on 20, then on
60, then on 180, for example (the factor is eta). After a rung it continues if fewer than 1/eta of the trials that have
reached this rung are on better fronts. This is the non-dominated sorting of Schmucker et al., "Multi-objective
Asynchronous Successive Halving" (arXiv 2106.12639), without their epsilon-net. Optuna's pruners support only one
objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]
"""The objectives of a trial: its score in [0, 1], followed by one or more costs."""
SMALLEST_RUNG = 8


def rungs(prompts: int, eta: int, smallest: int = SMALLEST_RUNG) -> list[int]:
    """List the number of prompts that a trial has decoded at the end of each rung; the last number is `prompts`."""
    sizes = [prompts]
    while (size := math.ceil(sizes[-1] / eta)) >= smallest and size < sizes[-1]:
        sizes.append(size)
    return sizes[::-1]


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is at least as good as `b` in the score and all costs, and differs from it."""
    as_good = a[0] >= b[0] and all(x <= y for x, y in zip(a[1:], b[1:], strict=True))
    return as_good and a != b


def fronts(points: Sequence[Point]) -> list[int]:
    """Return each point's front: 0 if no point dominates it, 1 if only points of front 0 dominate it, and so on."""
    remaining, front_of_point, level = set(range(len(points))), [0] * len(points), 0
    while remaining:
        front = {k for k in remaining if not any(dominates(points[j], points[k]) for j in remaining)}
        for k in front:
            front_of_point[k] = level
        remaining -= front
        level += 1
    return front_of_point


def is_promoted(point: Point, other_points: Sequence[Point], eta: int, loss: float) -> bool:
    """Whether a trial with the result `point` continues after a rung, where other trials have `other_points`. loss: a
    trial whose score is more than this below the best score does not continue."""
    best_score = max([point[0], *(candidate[0] for candidate in other_points)])
    if point[0] < best_score - loss:
        return False
    points = [point, *(candidate for candidate in other_points if candidate[0] >= best_score - loss)]
    levels = fronts(points)
    num_better = sum(level < levels[0] for level in levels)
    return num_better < max(1, (len(other_points) + 1) // eta)
