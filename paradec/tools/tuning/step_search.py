"""Search for the best set of steps to evaluate, of fixed size: evenly spread starts, annealing, then hill climbing.

Follows BudCache (arXiv 2606.13496), which starts at random and uses absolute temperatures. Here the start is the best
evenly spread set, temperatures are shares of its loss, and a move may shift all later steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

Steps = tuple[int, ...]
Loss = Callable[[Steps, float], float]
"""Called with a set and a bound: the loss of the set, or infinity if it is not below the bound."""

REACH = 3
"""Maximum distance by which a move shifts one step."""
TEMPERATURES = (0.05, 1e-5)
"""Temperatures of the first and the last proposal, as shares of the start's loss."""


def even_starts(total: int, budget: int) -> list[Steps]:
    """Evenly spread sets of `budget` of `total` steps: every k-th step, equal shares rounded down, and equal shares
    including both ends."""
    spread = (
        range(0, total, -(-total // budget)),
        [total * i // budget for i in range(budget)],
        [round((total - 1) * i / max(budget - 1, 1)) for i in range(budget)],
    )
    sets = {tuple(sorted(set(steps))): None for steps in spread}  # without duplicates
    return [steps for steps in sets if len(steps) == budget]


def moves(steps: Steps, total: int) -> Iterator[Steps]:
    """The neighbours of a set: one step is moved by up to `REACH`, or all steps from one on by 1; the first step
    stays."""
    for distance in range(1, REACH + 1):
        for index in range(1, len(steps)):
            for offset in (-distance, distance):
                new = steps[index] + offset
                if 0 < new < total and new not in steps:
                    yield tuple(sorted((*steps[:index], new, *steps[index + 1 :])))
    for index in range(1, len(steps)):
        for offset in (-1, 1):
            shifted = tuple(step + offset for step in steps[index:])
            if shifted[0] > steps[index - 1] and shifted[-1] < total:
                yield steps[:index] + shifted


def search(loss: Loss, starts: list[Steps], total: int, runs: int, seed: int = 0) -> tuple[Steps, Steps]:
    """Return the best of `starts`, and the best set found from there; of equal sets the earlier one.

    loss: see `Loss`; the caller caches it.
    runs: number of sets evaluated besides the starts, a third by annealing, the others by climbing.
    seed: of the proposals."""
    rng, evaluated = random.Random(seed), set(starts)
    values = {steps: loss(steps, math.inf) for steps in starts}
    even = best = min(starts, key=values.__getitem__)
    value = scale = values[even]

    def ask(steps: Steps, bound: float) -> float:
        nonlocal best, value
        evaluated.add(steps)
        new_loss = loss(steps, max(bound, value))
        if new_loss < value:
            best, value = steps, new_loss
        return new_loss

    def left(share: int) -> int:
        return len(starts) + share - len(evaluated)

    current, current_loss, tried = even, scale, 0
    first, last = TEMPERATURES
    while scale > 0 and left(runs // 3) > 0 and tried < 5 * runs:
        heat = scale * first * (last / first) ** min(1.0, (len(evaluated) - len(starts)) / max(runs // 3, 1))
        options, tried = list(moves(current, total)), tried + 1
        if not options:
            break
        proposal, bound = rng.choice(options), current_loss - heat * math.log(1 - rng.random())
        if (proposal_loss := ask(proposal, bound)) < bound:
            current, current_loss = proposal, proposal_loss
    improved = scale > 0
    while improved:
        improved, start = False, best
        for proposal in moves(start, total):
            if left(runs) <= 0 and proposal not in evaluated:
                break
            if ask(proposal, value) < math.inf and best != start:
                improved = True
                break
    return even, best
