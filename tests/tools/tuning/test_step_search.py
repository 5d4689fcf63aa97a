"""The search for steps, over losses that are tables."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradec.tools.tuning.step_search import Steps, even_starts, moves, search


def test_starts_are_even() -> None:
    assert even_starts(20, 7) == [(0, 3, 6, 9, 12, 15, 18), (0, 2, 5, 8, 11, 14, 17), (0, 3, 6, 10, 13, 16, 19)]
    assert even_starts(20, 5) == [(0, 4, 8, 12, 16), (0, 5, 10, 14, 19)]
    assert even_starts(6, 6) == [(0, 1, 2, 3, 4, 5)] and even_starts(9, 1) == [(0,)]
    for total in range(1, 30):
        for budget in range(1, total + 1):
            starts = even_starts(total, budget)
            assert starts and all(len(s) == budget and s[0] == 0 and s[-1] < total for s in starts)


@given(st.integers(2, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_a_search_keeps_its_promises(total: int, data: st.DataObject) -> None:
    """Sets of the budget with step 0, no more new ones than allowed, none asked for below its bound in vain."""
    budget = data.draw(st.integers(1, total))
    runs, seed = data.draw(st.sampled_from((0, 3, 10, 150))), data.draw(st.integers(0, 99))
    values: dict[Steps, float] = {}
    said: dict[Steps, float] = {}

    def value(steps: Steps) -> float:
        return values.setdefault(steps, random.Random(f"{seed} {steps}").random())

    def loss(steps: Steps, bound: float) -> float:
        assert len(set(steps)) == budget and steps[0] == 0 and steps[-1] < total and list(steps) == sorted(steps)
        said[steps] = value(steps)
        return value(steps) if value(steps) < bound else math.inf

    starts = even_starts(total, budget)
    even, found = search(loss, starts, total, runs, seed)
    assert len(set(said) - set(starts)) <= runs
    assert value(even) == min(map(value, starts)) and value(found) == min(said.values()) <= value(even)
    if runs == 150:
        assert all(value(near) >= value(found) for near in moves(found, total))
    assert search(loss, starts, total, runs, seed) == (even, found)


@pytest.mark.parametrize("runs", [30, 60])
def test_a_search_finds_what_climbing_alone_does_not_need(runs: int) -> None:
    best = (0, 1, 2, 3, 15)

    def loss(steps: Steps, bound: float) -> float:
        found = 0.1 + sum(abs(a - b) for a, b in zip(steps, best, strict=True))
        return found if found < bound else math.inf

    even, found = search(loss, even_starts(20, 5), 20, 10 * runs)
    assert found == best != even
