"""Successive halving for several objectives: which trials continue with more prompts.

One half of the prompts is for choosing settings. Every trial decodes it in the same order, in rungs that grow by a
factor eta (20, 60, 180). A trial continues after a rung if fewer than 1/eta of the trials there lie on better fronts.
This is non-dominated sorting as in Schmucker et al., "Multi-objective Asynchronous Successive Halving" (arXiv
2106.12639), without their epsilon-net. Optuna's pruners support one objective only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]
"""(score in [0, 1], then one or more costs)."""
SMALLEST_RUNG = 8


def rungs(prompts: int, eta: int, smallest: int = SMALLEST_RUNG) -> list[int]:
    """Number of prompts that a trial has decoded at the end of each rung; the last number is `prompts`."""
    sizes = [prompts]
    while (size := math.ceil(sizes[-1] / eta)) >= smallest and size < sizes[-1]:
        sizes.append(size)
    return sizes[::-1]


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is at least as good as `b` in the score and all costs, and differs from it."""
    as_good = a[0] >= b[0] and all(x <= y for x, y in zip(a[1:], b[1:], strict=True))
    return as_good and a != b


def fronts(points: Sequence[Point]) -> list[int]:
    """Index of each point's front: 0 if no point dominates it, 1 if only points of front 0 do, and so on."""
    remaining, front_of_point, level = set(range(len(points))), [0] * len(points), 0
    while remaining:
        front = {k for k in remaining if not any(dominates(points[j], points[k]) for j in remaining)}
        for k in front:
            front_of_point[k] = level
        remaining -= front
        level += 1
    return front_of_point


def is_promoted(point: Point, other_points: Sequence[Point], eta: int, loss: float) -> bool:
    """Whether a trial with the result `point` continues after a rung, given the results `other_points`. loss: a trial
    whose score is more than this below the best one is dropped."""
    best_score = max([point[0], *(candidate[0] for candidate in other_points)])
    if point[0] < best_score - loss:
        return False
    points = [point, *(candidate for candidate in other_points if candidate[0] >= best_score - loss)]
    levels = fronts(points)
    num_better = sum(level < levels[0] for level in levels)
    return num_better < max(1, (len(other_points) + 1) // eta)
