"""Parts of tuning: prompts, halves, scores, rungs and promotion, the search space, fronts, the search for steps."""

import itertools
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from paradec import caches, samplers
from paradec.core.prompts import encode
from paradec.request import Request
from paradec.tools.evaluation import packaged_questions
from paradec.tools.evaluation.configuration import Configuration
from paradec.tools.evaluation.metrics import bootstrap
from paradec.tools.evaluation.questions import Question
from paradec.tools.tuning import read_prompts
from paradec.tools.tuning.halving import dominates, fronts
from paradec.tools.tuning.prompts import fingerprint, split_halves, to_questions
from paradec.tools.tuning.result import Point, choose
from paradec.tools.tuning.scoring import Measured, Scorer, agreement, score_by_truth
from paradec.tools.tuning.space import Candidate, NumberDomain, build_space, domains
from paradec.tools.tuning.step_search import Steps, even_starts, moves, search

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]


def create_questions(tasks: dict[str, int], group: int = 1) -> list[Question]:
    return [Question(f"{task} {k}", f"{task} {k}", None, (k,), task, f"{task} {k // group}") for task in tasks
            for k in range(tasks[task])]  # fmt: skip


@pytest.mark.parametrize("group", [1, 3])
def test_halves_share_no_group_and_balance_tasks(group: int) -> None:
    entries = create_questions({"a": 12, "b": 7, "c": 1}, group)
    first, second = split_halves(entries, seed=3)
    assert sorted(e.key for e in first + second) == sorted(e.key for e in entries)
    assert not {e.group for e in first} & {e.group for e in second}
    for task in "abc":
        counts = [len({e.group for e in half if e.task == task}) for half in (first, second)]
        assert abs(counts[0] - counts[1]) <= 1
    # the first groups of a half already cover the tasks
    begins = list(dict.fromkeys(e.group for e in first))[:2]
    assert {name.split()[0] for name in begins} == {"a", "b"}


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "What is 2 + 3?", "answer": ["5", "five"]},
        {"prompt": "Say hello.", "regex": "(?i)hello", "task": "manners"},
        {"prompt": "Write."},
        {"input_ids": [1, 40, 2], "answer_ids": [7], "group": "g"},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    actual = read_prompts(file)
    assert [e.judged for e in actual] == [True, True, False, True]
    assert score_by_truth(actual[0], [], " five ") == 1 and score_by_truth(actual[0], [], "six") == 0
    assert score_by_truth(actual[1], [], "oh, Hello") == 1 and actual[1].task == "manners"
    assert score_by_truth(actual[2], [], "x") is None
    assert actual[3].prompt == [1, 40, 2] and actual[3].truth == (7,) and actual[3].group == "g"
    assert fingerprint(actual) != fingerprint(actual[:3]) and len(read_prompts(file, 2)) == 2


def test_prompts_from_python_objects() -> None:
    question = packaged_questions(limit=1)[0]
    prompts = ["a", [{"role": "user", "content": "b"}], np.array([1, 2]), question]
    actual = to_questions(prompts, ["x", None, [3, 4], None])
    assert [e.judged for e in actual] == [True, False, True, True]
    assert actual[1].prompt == [{"role": "user", "content": "b"}] and actual[2].prompt == [1, 2]
    assert actual[2].truth == (3, 4) and actual[3].task == question.task
    with pytest.raises(ValueError, match="which has a judge"):
        to_questions([question], ["x"])


def test_scores_by_hand() -> None:
    assert agreement([1, 2, 3], [1, 9, 3, 4]) == 2 / 4
    assert agreement([], []) == 1 and agreement([], [1]) == 0
    entry = Question("p", "p", None, (1, 2))
    assert Scorer("answers").score(entry, [1, 3], None, None) == 0.5
    assert Scorer("agreement").score(entry, [1, 3], None, [1, 3]) == 1
    judged: list[Any] = []
    judge = Scorer("checker", lambda prompt, answer: judged.append((prompt, answer)) or 0.25)
    assert judge.score(entry, [1, 3], None, None) == 0.25 and judge.score(entry, [1], "text", None) == 0.25
    assert judged == [("p", [1, 3]), ("p", "text")]
    for wrong in (2, -0.1, "x", None, float("nan")):
        with pytest.raises(ValueError, match="from 0 to 1"):
            Scorer("checker", lambda prompt, answer, wrong=wrong: wrong).score(entry, [], "", None)
    with pytest.raises(ValueError, match="tokenizer"):
        score_by_truth(Question("p", "p", lambda text: True), [1], None)


def test_fronts_are_nested_pareto_fronts() -> None:
    draw = random.Random(0)
    for count, costs in itertools.product((1, 2, 9, 30), (1, 2)):
        points = [(draw.randint(0, 5) / 5, *(draw.randint(1, 6) for _ in range(costs))) for _ in range(count)]
        levels, remaining, level = fronts(points), list(range(count)), 0

        def beats(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
            return a[0] >= b[0] and all(x <= y for x, y in zip(a[1:], b[1:])) and a != b

        while remaining:
            best = [k for k in remaining if not any(beats(points[j], points[k]) for j in remaining)]
            assert all(levels[k] == level for k in best)
            remaining, level = [k for k in remaining if k not in best], level + 1
    assert dominates((1, 2), (1, 3)) and not dominates((1, 2), (1, 2)) and not dominates((0.5, 1), (1, 2))


@pytest.mark.parametrize("name", MASKED)
def test_ranges_cover_hand_set_values_and_valid_settings(name: str) -> None:
    cls = samplers.get(name)
    actual = domains(cls)
    assert set(actual) == {setting for changes in cls.sweep for setting in changes}
    for setting, domain in actual.items():
        defaults = {**cls.settings(), "steps": 1.0}
        values = [defaults[setting], *(changes[setting] for changes in cls.sweep if setting in changes)]
        if isinstance(domain, NumberDomain):
            assert domain.low < domain.high and all(domain.low <= value <= domain.high for value in values)
            for end in (domain.low, domain.high):
                if setting != "steps" and end not in values:  # hand-set values depend on other settings
                    samplers.create(name, **{setting: end})
            assert domain.whole == all(isinstance(value, int) for value in values)
            assert not domain.log or domain.low > 0
        else:
            assert all(value in domain.values for value in values)  # not with sets: mappings have no hash


def test_unsupported_pairs_are_omitted_and_reported() -> None:
    model = tiny(1)
    space = build_space(model, encode(model, [[1, 2]]), {}, None, caches.names(), [None])
    for name, allowed in space.caches.items():
        for cache in caches.names():
            refused = f"{name} with {cache}" in space.left_out
            assert refused != (cache in allowed)
            method = Configuration(name).make()
            try:
                method.start(model, [[1, 2]], max_new_tokens=4, cache=cache)
                assert not refused
            except ValueError:
                assert refused
    assert any(" with " in name for name in space.left_out)
    with pytest.raises(ValueError, match="family 'draft_verify'"):
        build_space(model, encode(model, [[1, 2]]), {}, ["sjd"], ["none"], [None])
    with pytest.raises(ValueError, match="freedave"):
        build_space(model, encode(model, [[1, 2]]), {"rng": "reference"}, ["freedave"], ["none"], [None])


def point(name: str, score: float | list[float], forwards: float, by_hand: bool = False) -> Point:
    scores = score if isinstance(score, list) else [score] * 4
    costs = [[value] * len(scores) for value in (forwards, 0.0, 0.0)]
    return Point(Candidate(name), Request(), Measured(scores, [*scores], *costs), by_hand=by_hand)  # type: ignore[arg-type]


def names(points: Iterable[Point]) -> list[str]:
    return [entry.name for entry in points]


def test_the_cheapest_candidate_that_is_not_worse_is_chosen() -> None:
    """Choose the cheapest hand-set candidate near the best score, or a cheaper one that is surely not worse."""

    def chosen(points: list[Point], tolerance: float = 0.01) -> list[str]:
        groups = [str(k) for k in range(len(points[0].choosing))]
        return names(choose(points, ("forwards",), tolerance, groups)) if points else []

    hand = [point(*entry, by_hand=True) for entry in (("a", 0.9, 5), ("b", 0.9, 4), ("c", 0.895, 3), ("d", 0.7, 1))]
    assert chosen(hand) == ["c", "c"] and chosen(hand, 0.0) == ["b", "b"] and chosen(hand, 0.3) == ["d", "d"]
    assert choose([], ("forwards",), 0.01, []) == []
    assert chosen([*hand, point("cheaper", 0.895, 2)]) == ["cheaper", "c"]
    assert chosen([*hand, point("cheapest", 0.895, 1), point("cheaper", 0.9, 2)]) == ["cheapest", "c"]
    assert chosen([*hand, point("as costly", 0.95, 3)]) == ["c", "c"]
    assert chosen([*hand, point("the best of many", 1.0, 9)]) == ["c", "c"], "only hand-set candidates set the mark"
    assert chosen([*hand, point("half a point below", 0.89, 2)]) == ["c", "c"]
    # equal means, but the difference depends on one prompt of four
    lucky = point("lucky", [0.8, 0.8, 1.0, 0.98], 2)
    assert chosen([*hand[:3], lucky]) == ["c", "c"] and chosen([*hand[:3], lucky], 0.1) == ["lucky", "c"]
    # without hand-set candidates, the same rule applies to all
    assert chosen([point("a", 0.9, 5), point("b", 0.895, 4)]) == ["b", "b"]


def test_a_grouped_bootstrap_draws_whole_groups() -> None:
    values, groups = [0.0, 0.0, 1.0, 1.0, 1.0, 0.0], ["a", "a", "b", "b", "b", "c"]
    low, high = bootstrap(values, groups)
    sums, sizes = {"a": 0, "b": 3, "c": 0}, {"a": 2, "b": 3, "c": 1}
    means = sorted(
        sum(sums[name] for name in drawn) / sum(sizes[name] for name in drawn)
        for drawn in itertools.product("abc", repeat=3)
    )
    # of 27 equally likely draws, 8 have no b and one has only b
    assert low == means[0] == 0 and high == means[-1] == 1
    assert bootstrap([0.5] * 4, list("abcd")) == (0.5, 0.5)
    single = bootstrap(list(np.linspace(0, 1, 40)), [str(k) for k in range(40)])
    assert single[0] == pytest.approx(0.5 - 1.96 * 0.3 / 40**0.5, abs=0.02)


def test_starts_of_step_searches_are_even() -> None:
    assert even_starts(20, 7) == [(0, 3, 6, 9, 12, 15, 18), (0, 2, 5, 8, 11, 14, 17), (0, 3, 6, 10, 13, 16, 19)]
    assert even_starts(20, 5) == [(0, 4, 8, 12, 16), (0, 5, 10, 14, 19)]
    assert even_starts(6, 6) == [(0, 1, 2, 3, 4, 5)] and even_starts(9, 1) == [(0,)]
    for total in range(1, 30):
        for budget in range(1, total + 1):
            starts = even_starts(total, budget)
            assert starts and all(len(s) == budget and s[0] == 0 and s[-1] < total for s in starts)


@given(st.integers(2, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_step_searches_respect_budget_and_bounds(total: int, data: st.DataObject) -> None:
    """Sets have the size of the budget and contain step 0; the number of evaluations and the bounds are respected."""
    budget = data.draw(st.integers(1, total))
    runs, seed = data.draw(st.sampled_from((0, 3, 10, 150))), data.draw(st.integers(0, 99))
    values: dict[Steps, float] = {}
    evaluated: dict[Steps, float] = {}

    def value(steps: Steps) -> float:
        return values.setdefault(steps, random.Random(f"{seed} {steps}").random())

    def loss(steps: Steps, bound: float) -> float:
        assert len(set(steps)) == budget and steps[0] == 0 and steps[-1] < total and list(steps) == sorted(steps)
        evaluated[steps] = value(steps)
        return value(steps) if value(steps) < bound else math.inf

    starts = even_starts(total, budget)
    even, actual = search(loss, starts, total, runs, seed)
    assert len(set(evaluated) - set(starts)) <= runs
    assert value(even) == min(map(value, starts)) and value(actual) == min(evaluated.values()) <= value(even)
    if runs == 150:
        assert all(value(near) >= value(actual) for near in moves(actual, total))
    assert search(loss, starts, total, runs, seed) == (even, actual)


@pytest.mark.parametrize("runs", [300, 600])
def test_step_searches_find_the_optimum(runs: int) -> None:
    best = (0, 1, 2, 3, 15)

    def loss(steps: Steps, bound: float) -> float:
        result = 0.1 + sum(abs(a - b) for a, b in zip(steps, best, strict=True))
        return result if result < bound else math.inf

    even, actual = search(loss, even_starts(20, 5), 20, runs)
    assert actual == best != even
