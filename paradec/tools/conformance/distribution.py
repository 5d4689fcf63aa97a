"""Whether draws follow a distribution: Pearson's chi-square test, and what it would have found.

`benchmarks/exactness.py` holds this library's samplers to such distributions with more draws and more settings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST = 8.0
"""Expected draws below which answers are counted together."""
LEVEL = 0.001
"""A corrected p-value below it says that the draws follow another distribution."""
POWER = 0.9


@dataclass(frozen=True)
class Fit:
    """What a test found."""

    draws: int
    chi_square: float
    degrees: int
    p_value: float
    """Of this test alone."""
    impossible: list[int] | None = None
    """An answer that was drawn and has no probability; then the p-value is 0."""
    finds: float = math.nan
    """The smallest relative error of the answers' probabilities that the test finds 9 times of 10 at `LEVEL`, where all
    are off by as much; in total variation half of it."""


def fit(answers: Sequence[Sequence[int]], probabilities: Sequence[float], drawn: Counter[tuple[int, ...]]) -> Fit:
    """Test draws against the distribution of `answers` with these `probabilities`, which add up to 1."""
    draws = drawn.total()
    known = {tuple(answer): number for number, answer in enumerate(answers)}
    for answer in drawn:
        if answer not in known:
            return Fit(draws, math.inf, len(answers) - 1, 0.0, list(answer))
    expected = torch.tensor(probabilities, dtype=torch.float64) * draws
    counts = torch.zeros(len(answers), dtype=torch.float64)
    for answer, count in drawn.items():
        counts[known[answer]] = count
    counts, expected = pooled(counts, expected)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    return Fit(draws, statistic, degrees, tail(statistic, degrees))


def pooled(counts: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Cells that expect fewer than `FEWEST` as one; where that one is too small as well, with the smallest other."""
    few = expected < FEWEST
    if not few.any():
        return counts, expected
    cells = [torch.cat((values[~few], values[few].sum().unsqueeze(0))) for values in (counts, expected)]
    if cells[1][-1] < FEWEST and len(cells[1]) > 1:
        at = int(cells[1][:-1].argmin())
        for values in cells:
            values[at] += values[-1]
        cells = [values[:-1] for values in cells]
    return cells[0], cells[1]


def tail(statistic: float, degrees: int) -> float:
    """The probability that chi-square with so many degrees of freedom exceeds the statistic; 1 without any."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def found_error(draws: int, degrees: int, tests: int) -> float:
    """`Fit.finds` of a test with so many draws, one of `tests` (Bonferroni)."""
    if degrees < 1:
        return math.nan
    critical = _root(lambda value: LEVEL / tests - tail(value, degrees), 0.0, 1e7)
    shift = _root(lambda value: _shifted_tail(critical, degrees, value) - POWER, 0.0, 1e6)
    return math.sqrt(shift / draws)


def _shifted_tail(statistic: float, degrees: int, shift: float) -> float:
    """As `tail`, of the noncentral chi-square: a Poisson mixture of central ones."""
    mean = shift / 2
    most = int(mean + 12 * math.sqrt(mean + 1) + 20)
    number = torch.arange(most, dtype=torch.float64)
    weight = torch.exp(number * math.log(mean) - mean - torch.lgamma(number + 1)) if mean else (number == 0).double()
    central = torch.special.gammaincc(degrees / 2 + number, torch.full_like(number, statistic / 2))
    return float((weight * central).sum())


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses 0, by halving."""
    top = 1.0
    while top < high and rising(top) < 0:
        top *= 2
    for _ in range(80):
        middle = (low + top) / 2
        low, top = (middle, top) if rising(middle) < 0 else (low, middle)
    return top
