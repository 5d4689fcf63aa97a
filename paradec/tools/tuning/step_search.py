"""Search for the best set of a fixed number of steps to evaluate: evenly spread starts, annealing, then hill climbing.

Unlike in BudCache (arXiv 2606.13496), which starts with a random set and has absolute temperatures, the start is
the best evenly spread set, temperatures are shares of its loss, and a move may shift all later steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

Steps = tuple[int, ...]
Loss = Callable[[Steps, float], float]
"""Function (set of steps, bound) -> loss of the set; infinity if the loss is not below the bound."""

REACH = 3
"""Maximum distance by which a move shifts one step."""
TEMPERATURES = (0.05, 1e-5)
"""Temperatures of the first and the last proposal, as shares of the loss of the best start."""


def even_starts(total: int, budget: int) -> list[Steps]:
    """List the different evenly spread sets of `budget` of `total` steps: every k-th step, equal distances rounded
    down, and equal distances from the first to the last step."""
    spread = (
        range(0, total, -(-total // budget)),
        [total * i // budget for i in range(budget)],
        [round((total - 1) * i / max(budget - 1, 1)) for i in range(budget)],
    )
    sets = {tuple(sorted(set(steps))): None for steps in spread}
    return [steps for steps in sets if len(steps) == budget]


def moves(steps: Steps, total: int) -> Iterator[Steps]:
    """Yield the neighbours of a set: one step moves by at most `REACH`, or a step and all later steps move by 1. The
    first step stays."""
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
    """Return the best of `starts`, and the best set that the search finds from it; of equally good sets, the earlier.

    loss: see `Loss`. It may be called again for the same set, so the caller should cache it.
    runs: number of sets to evaluate besides the starts: the first third by annealing, the others by climbing.
    seed: seed of the proposals."""
    rng, evaluated = random.Random(seed), set(starts)
    values = {steps: loss(steps, math.inf) for steps in starts}
    even = best = min(starts, key=values.__getitem__)
    value = scale = values[even]

    def evaluate(steps: Steps, bound: float) -> float:
        nonlocal best, value
        evaluated.add(steps)
        new_loss = loss(steps, max(bound, value))
        if new_loss < value:
            best, value = steps, new_loss
        return new_loss

    def num_remaining(max_sets: int) -> int:
        return len(starts) + max_sets - len(evaluated)

    current, current_loss, num_proposals = even, scale, 0
    first, last = TEMPERATURES
    while scale > 0 and num_remaining(runs // 3) > 0 and num_proposals < 5 * runs:
        heat = scale * first * (last / first) ** min(1.0, (len(evaluated) - len(starts)) / max(runs // 3, 1))
        options, num_proposals = list(moves(current, total)), num_proposals + 1
        if not options:
            break
        proposal, bound = rng.choice(options), current_loss - heat * math.log(1 - rng.random())
        if (proposal_loss := evaluate(proposal, bound)) < bound:
            current, current_loss = proposal, proposal_loss
    improved = scale > 0
    while improved:
        improved, start = False, best
        for proposal in moves(start, total):
            if num_remaining(runs) <= 0 and proposal not in evaluated:
                break
            if evaluate(proposal, value) < math.inf and best != start:
                improved = True
                break
    return even, best
