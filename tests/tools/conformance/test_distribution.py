"""The chi-square test against SciPy's, and what it finds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from paradec.tools.conformance import distribution
from paradec.tools.conformance.run import Outcome, judge_distributions


@pytest.mark.parametrize(("statistic", "degrees"), [(0.5, 1), (3.0, 2), (49.0, 49), (700.0, 624), (1e4, 600)])
def test_the_tail_is_scipys(statistic: float, degrees: int) -> None:
    assert distribution.tail(statistic, degrees) == pytest.approx(
        stats.chi2.sf(statistic, degrees), rel=1e-9, abs=1e-300
    )


@pytest.mark.parametrize("degrees", [3, 49, 400])
@pytest.mark.parametrize("tests", [1, 20])
def test_the_power_is_scipys(degrees: int, tests: int) -> None:
    error = distribution.found_error(10_000, degrees, tests)
    critical = stats.chi2.isf(distribution.LEVEL / tests, degrees)
    assert stats.ncx2.sf(critical, degrees, 10_000 * error**2) == pytest.approx(distribution.POWER, rel=1e-6)


def test_rare_answers_are_counted_together() -> None:
    counts, expected = torch.tensor([90.0, 4, 3, 3]), torch.tensor([88.0, 5, 4, 3])
    assert [cells.tolist() for cells in distribution.pooled(counts, expected)] == [[90, 10], [88, 12]]
    # too few together: with the smallest that is left
    counts, expected = torch.tensor([60.0, 37, 3]), torch.tensor([60.0, 36, 4])
    assert [cells.tolist() for cells in distribution.pooled(counts, expected)] == [[60, 40], [60, 40]]
    assert distribution.pooled(counts[:2], expected[:2])[0].tolist() == [60, 37]


def test_a_distribution_and_one_that_is_off() -> None:
    """Draws of the distribution itself pass; of one that is off by what the test says it finds, most do not."""
    answers, probabilities = [[i] for i in range(40)], np.full(40, 1 / 40)
    error = distribution.found_error(4000, 39, 1)
    off = probabilities * (1 + error * np.where(np.arange(40) % 2, 1, -1))

    def p_values(p: np.ndarray) -> list[float]:
        found = []
        for seed in range(40):
            counts = np.random.default_rng(seed).multinomial(4000, p)
            drawn = Counter({(i,): int(count) for i, count in enumerate(counts) if count})
            found.append(distribution.fit(answers, probabilities.tolist(), drawn).p_value)
        return found

    assert min(p_values(probabilities)) > distribution.LEVEL
    assert sum(p < distribution.LEVEL for p in p_values(off)) >= 32  # of 40, 36 expected


def test_an_answer_of_no_probability_is_named() -> None:
    found = distribution.fit([[0], [1]], [0.5, 0.5], Counter({(0,): 50, (2,): 1}))
    assert (found.p_value, found.impossible) == (0.0, [2])


def test_p_values_are_corrected_for_how_many_distributions_were_tested() -> None:
    def judged(count: int) -> list[str]:
        found = [
            Outcome(str(i), "laws", "sjd", "agree", fit=distribution.Fit(100, 60.0, 30, 0.0005)) for i in range(count)
        ]
        judge_distributions(found)
        return [outcome.status for outcome in found]

    assert judged(1) == ["differ"] and judged(3) == ["agree"] * 3
