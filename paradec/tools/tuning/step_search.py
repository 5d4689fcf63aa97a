"""Search for the steps to evaluate, for a number of them: even starts, annealing, climbing.

After BudCache (arXiv 2606.13496), which starts at random, with absolute temperatures. Here the start is the best even
one, temperatures are shares of its loss, and a move may shift all later steps. Shares no code with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

Steps = tuple[int, ...]
Loss = Callable[[Steps, float], float]
"""The loss of a set, or infinity where it is not below the bound."""

REACH = 3
"""Steps that a move goes at most."""
TEMPERATURES = (0.05, 1e-5)
"""Of the first and the last proposal, as shares of the start's loss."""


def even_starts(total: int, budget: int) -> list[Steps]:
    """Evenly spread sets of `budget` of `total` steps: every k-th, rounded down from equal shares, ends included."""
    spread = (
        range(0, total, -(-total // budget)),
        [total * i // budget for i in range(budget)],
        [round((total - 1) * i / max(budget - 1, 1)) for i in range(budget)],
    )
    sets = {tuple(sorted(set(steps))): None for steps in spread}  # a set that is there twice counts once
    return [steps for steps in sets if len(steps) == budget]


def moves(steps: Steps, total: int) -> Iterator[Steps]:
    """The neighbours of a set: one step moved by up to `REACH`, or all steps from one on by 1; step 0 stays."""
    for distance in range(1, REACH + 1):
        for at in range(1, len(steps)):
            for way in (-distance, distance):
                new = steps[at] + way
                if 0 < new < total and new not in steps:
                    yield tuple(sorted((*steps[:at], new, *steps[at + 1 :])))
    for at in range(1, len(steps)):
        for way in (-1, 1):
            later = tuple(step + way for step in steps[at:])
            if later[0] > steps[at - 1] and later[-1] < total:
                yield steps[:at] + later


def search(loss: Loss, starts: list[Steps], total: int, runs: int, seed: int = 0) -> tuple[Steps, Steps]:
    """Return the best of `starts`, and the best set found from there; of equal ones the earlier.

    Args:
        loss: of a set; cached by the caller.
        runs: new sets beyond the starts, a third of them annealing, the others climbing.
        seed: of the proposals.
    """
    draw, seen = random.Random(seed), set(starts)
    values = {steps: loss(steps, math.inf) for steps in starts}
    even = best = min(starts, key=values.__getitem__)
    value = scale = values[even]

    def ask(steps: Steps, bound: float) -> float:
        nonlocal best, value
        seen.add(steps)
        found = loss(steps, max(bound, value))
        if found < value:
            best, value = steps, found
        return found

    def left(share: int) -> int:
        return len(starts) + share - len(seen)

    at, here, tried = even, scale, 0
    first, last = TEMPERATURES
    while scale > 0 and left(runs // 3) > 0 and tried < 5 * runs:
        heat = scale * first * (last / first) ** min(1.0, (len(seen) - len(starts)) / max(runs // 3, 1))
        options, tried = list(moves(at, total)), tried + 1
        if not options:
            break
        proposal, bound = draw.choice(options), here - heat * math.log(1 - draw.random())
        if (found := ask(proposal, bound)) < bound:
            at, here = proposal, found
    improved = scale > 0
    while improved:
        improved, begin = False, best
        for proposal in moves(begin, total):
            if left(runs) <= 0 and proposal not in seen:
                break
            if ask(proposal, value) < math.inf and best != begin:
                improved = True
                break
    return even, best
