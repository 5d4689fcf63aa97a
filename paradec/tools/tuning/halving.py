"""Successive halving for several objectives: which trials go on to more prompts.

Every trial decodes the choosing half's prompts in one fixed order, in rungs that grow by a factor (20, 60, 180). It
goes on after a rung if fewer than 1/eta of the trials there lie on better fronts: non-dominated sorting as in Schmucker
et al., "Multi-objective Asynchronous Successive Halving" (arXiv 2106.12639), without their epsilon-net. Optuna's
pruners know one objective only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]
"""(score from 0 to 1, then what it costs, one number or several)."""
SMALLEST_RUNG = 8


def rungs(prompts: int, eta: int, smallest: int = SMALLEST_RUNG) -> list[int]:
    """How many prompts a trial has decoded at the end of each rung, the last of all of them."""
    found = [prompts]
    while (size := math.ceil(found[-1] / eta)) >= smallest and size < found[-1]:
        found.append(size)
    return found[::-1]


def dominates(a: Point, b: Point) -> bool:
    """Whether `a` is as good as `b` in everything, and better in something."""
    as_good = a[0] >= b[0] and all(x <= y for x, y in zip(a[1:], b[1:], strict=True))
    return as_good and a != b


def fronts(points: Sequence[Point]) -> list[int]:
    """Which front each point is on: 0 where nothing dominates it, 1 where only those of front 0 do, and so on."""
    left, found, level = set(range(len(points))), [0] * len(points), 0
    while left:
        front = {k for k in left if not any(dominates(points[j], points[k]) for j in left)}
        for k in front:
            found[k] = level
        left -= front
        level += 1
    return found


def goes_on(own: Point, others: Sequence[Point], eta: int, loss: float) -> bool:
    """Whether a trial with the result `own` at a rung goes on, given those of `others`; `loss` is the distance below
    the best score (a share) from which on a trial is dropped."""
    best = max([own[0], *(other[0] for other in others)])
    if own[0] < best - loss:
        return False
    points = [own, *(other for other in others if other[0] >= best - loss)]
    levels = fronts(points)
    ahead = sum(level < levels[0] for level in levels)
    return ahead < max(1, (len(others) + 1) // eta)
