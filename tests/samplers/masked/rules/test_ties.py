"""Values exactly at a threshold: which side they fall on is part of every rule, and no random number ever meets it."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rule_views import view_of
from torch import Tensor

import paradec
from paradec import AdaptiveBlocks, samplers
from paradec.samplers.distributions import filter_logits
from paradec.samplers.features.adaptive_blocks import Opening
from paradec.samplers.features.early_stops import WATCHED
from paradec.samplers.masked.loop import Stage, View

INF = math.inf
END = 9


def around(value: float) -> list[float]:
    """Just above a value, the value, and just below it."""
    return [math.nextafter(value, INF), value, math.nextafter(value, -INF)]


def seen(scores: list[float], quota: int | None = None, **more: Any) -> View:
    """A view of one row; "tokens", "memory", "quantities", "updates" and so on as given, each [W]."""
    view = view_of(torch.tensor([scores], dtype=torch.float64))
    given = tensors(more)
    quantities = view.quantities | given.pop("quantities", {})
    ends = torch.tensor([END])
    quotas = None if quota is None else np.array([quota])
    return dataclasses.replace(view, quantities=quantities, quota=quotas, ends=ends, **given)


def tensors(values: Any) -> Any:
    """Lists as one row of tensors, numbers as one row's number."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, dict):
        return {name: tensors(value) for name, value in values.items()}
    return torch.tensor([values])


def chosen(sampler: str, scores: list[float], quota: int | None = None, settings: Any = None, **more: Any) -> list[int]:
    """The columns that a rule selects of one row."""
    view = seen(scores, quota, **more)
    selected = samplers.create(sampler, **(settings or {})).select(view) & view.candidates
    return selected[0].nonzero().flatten().tolist()


BEST = 1.0
"""Stands first in every row: what is committed always."""

INCLUDED = [
    ("threshold", {"threshold": 0.75}, 0.75, True),
    ("adablock", {"threshold": 0.75}, 0.75, True),
    ("credit", {"threshold": 0.75}, 0.75, True),
    ("localleap", {"anchor_threshold": 0.75, "relaxed_threshold": 0.75}, 0.75, True),
    ("localleap", {"anchor_threshold": 0.75, "relaxed_threshold": 0.25, "radius": 0}, 0.75, True),
    # the first one is an anchor, and all others are near it
    ("localleap", {"anchor_threshold": 0.75, "relaxed_threshold": 0.25}, 0.25, True),
    ("hierarchy", {"threshold": 0.75, "low_threshold": None}, 0.75, False),
    ("wino", {"threshold": 0.75}, 0.75, False),
    ("editing", {"threshold": 0.75}, 0.75, False),
    # with c_1 = 1, c_2 needs 3 (1 - c_2) <= 1.5
    ("factor", {"factor": 1.5}, 0.5, True),
    ("entropy_threshold", {"threshold": 0.5}, -0.5, True),
]


@pytest.mark.parametrize(("name", "settings", "value", "included"), INCLUDED)
def test_a_score_at_the_threshold(name: str, settings: dict, value: float, included: bool) -> None:
    best = BEST if value > 0 else -1e-9
    for score, expected in zip(around(value), (True, included, False), strict=True):
        assert chosen(name, [best, score], settings=settings) == ([0, 1] if expected else [0]), score


def test_a_threshold_of_one_is_reached() -> None:
    """Trained models are so sure that probabilities round to 1."""
    scores = [1.0, math.nextafter(1.0, 0), 1.0, -INF]
    for name in ("threshold", "adablock", "credit", "localleap"):
        setting = "anchor_threshold" if name == "localleap" else "threshold"
        assert chosen(name, scores, settings={setting: 1.0, **({"radius": 0} if name == "localleap" else {})}) == [0, 2]


def test_hierarchy_at_the_low_threshold() -> None:
    for score, expected in zip(around(0.5), (True, False, False), strict=True):
        found = chosen("hierarchy", [0.625, -INF, 0.25, score], settings={"threshold": None, "low_threshold": 0.5})
        assert found == ([0, 3] if expected else [0])


def test_localleap_reaches_as_far_as_its_radius() -> None:
    scores = [0.5] * 3 + [0.875] + [0.5] * 4
    assert chosen("localleap", scores, settings={"anchor_threshold": 0.75, "relaxed_threshold": 0.5, "radius": 2}) == [
        *range(1, 6)
    ]


def test_factor_at_every_rank() -> None:
    """(n + 1) (1 - c_n) <= f with numbers that are exact: n = 1 always, n = 3 at 1 - f / 4."""
    for score, expected in zip(around(0.75), (True, True, False), strict=True):
        assert chosen("factor", [0.875, 0.875, score], settings={"factor": 1.0}) == [0, 1, 2][: 2 + expected]


def test_entropy_bound_at_gamma() -> None:
    """The entropies before the k-th sum to gamma."""
    for second, expected in zip(around(-0.5), (True, True, False), strict=True):
        assert chosen("entropy_bound", [-0.125, second, -0.75], settings={"gamma": 0.625}) == [0, 1, 2][: 2 + expected]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_klass_is_strict_in_confidence_and_counts_its_steps(steps: int) -> None:
    settings = {"confidence_threshold": 0.5, "history": 2}
    for score, sure in zip(around(0.5), (True, False, False), strict=True):
        updates = {"stable": [0, steps]}
        expected = [1] if sure and steps >= 2 else [0]
        assert chosen("klass", [0.875, score], 1, settings, updates=updates) == expected


def test_klass_is_strict_in_divergence() -> None:
    """A distribution that did not change diverges by 0, which is below any threshold; one at the threshold is not."""
    sampler = samplers.create("klass", kl_threshold=0.5, history=1)
    memory = {name: torch.zeros(1, 1, *((4,) if name == "previous" else ()), dtype=spec.dtype)
              for name, spec in sampler.memory().items()}  # fmt: skip
    logits = torch.tensor([[[1.0, 0.0, -1.0, 2.0]]], dtype=torch.float64)
    stage = Stage(torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64), memory)
    _, first = sampler.process_logits(logits, stage)
    assert first["stable"].tolist() == [[0]]
    again = dataclasses.replace(stage, memory=first)
    p = first["previous"].double()
    assert sampler.process_logits(logits, again)[1]["stable"].tolist() == [[1]]
    # the divergence of another step, measured as the formula has it, as the threshold itself
    other = logits.flip(-1)
    q = other.softmax(-1).float()
    measured = float(torch.linalg.vecdot(q, ((q + 1e-12) / (p.float() + 1e-12)).log()))
    for threshold, stable in zip(around(measured), (1, 0, 0), strict=True):
        # in float32, the next numbers are further apart
        threshold = measured if threshold == measured else measured * (1 + 1e-5 * (1 if threshold > measured else -1))
        found = samplers.create("klass", kl_threshold=threshold, history=1).process_logits(other, again)[1]
        assert found["stable"].tolist() == [[stable]], threshold


def test_persistence_at_its_three_thresholds() -> None:
    """Confidence and steps of at least so much, and an end token of at least `end_threshold`."""
    settings = {"threshold": 0.75, "persist": 3, "end_threshold": 0.5}

    def lasting(score: float, runs: int, token: int = 1) -> list[int]:
        memory = {"best": [5, token], "run": [1, runs]}
        quantities = {"best_token": torch.tensor([[4, token]])}
        tokens = torch.tensor([[4, token]])
        return chosen("persistence", [0.875, score], 1, settings, memory=memory, quantities=quantities, tokens=tokens)

    for score, enough in zip(around(0.75), (True, True, False), strict=True):
        for runs in (1, 2, 3):  # this step is one more
            assert lasting(score, runs) == ([0, 1] if enough and runs >= 2 else [0])
    # an end token is the best one, and is committed first if it is sure enough
    for score, enough in zip(around(0.5), (True, True, False), strict=True):
        view = {"memory": {"best": [5, 5], "run": [0, 0]}, "quantities": {"best_token": torch.tensor([[END, 1]])}}
        found = chosen("persistence", [score, 0.25], 1, settings, tokens=torch.tensor([[END, 1]]), **view)
        assert found == ([0] if enough else [1])


def test_ccd_at_its_entropy() -> None:
    for score, enough in zip(around(-0.5), (True, True, False), strict=True):
        for buffered in (True, False):
            updates = {"buffered": [True, buffered]}
            found = chosen("ccd", [-0.125, score], 1, {"entropy_threshold": 0.5}, updates=updates)
            assert found == ([0, 1] if enough and buffered else [0])


@pytest.mark.parametrize(
    ("step", "masks", "quota", "agreed", "expected"),
    [
        (1, 11, 1, range(6), [0]),  # the second of two warmup steps
        (2, 11, 1, range(6), [0, 1, 2]),  # n grows from the last of them on
        (2, 12, 1, range(6), [0, 1]),  # half of the masks are left
        (2, 11, 2, (0, 2), [0, 2]),  # as many as the schedule grants agree
        (2, 11, 2, (2,), [0, 1]),
        (2, 11, 1, (0,), [0]),
    ],
)
def test_ccd_agree_at_its_warmup_tail_and_quota(
    step: int, masks: int, quota: int, agreed: Any, expected: list[int]
) -> None:
    settings = {"warmup": 2, "expand_ratio": 4.0, "tail": 0.5}
    best = [1 if column in agreed else 2 for column in range(6)]
    memory = {"best": best, "buffer": [True] * 6, "step": step, "masks": masks}
    scores = [-0.1 * column for column in range(1, 7)]
    quantities = {"best_token": torch.ones(1, 6, dtype=torch.int64)}
    assert chosen("ccd_agree", scores, quota, settings, memory=memory, quantities=quantities) == expected


def test_learn2pd_at_its_thresholds() -> None:
    for acceptance, more in zip(around(0.75), (True, False, False), strict=True):
        quantities = {"acceptance": torch.tensor([[0.0, acceptance]], dtype=torch.float64)}
        found = chosen("learn2pd", [0.875, 0.25], settings={"filter_threshold": 0.75}, quantities=quantities)
        assert found == ([0, 1] if more else [0])
    sampler = samplers.create("learn2pd", eot_confidence=0.5)
    for confidence, cuts in zip(around(0.5), (True, True, False), strict=True):
        view = seen([0.875, confidence], quantities={"is_end": torch.tensor([[False, True]])})
        (cut,) = sampler.trim(view, torch.tensor([[True, True]])).tolist()
        assert (cut == 9) == cuts  # the view begins at position 7


def revised(sampler: str, settings: dict, decided: float, tokens: int = 2, **more: Any) -> Any:
    """What is taken back of one row: an undecided column that is committed, two of them under `more`, and a decided one
    whose token is 1."""
    candidates = torch.tensor([[True, True, False]])
    view = seen(
        [0.875, 0.875, -INF],
        candidates=candidates,
        editable=~candidates,
        current=torch.tensor([[0, 0, 1]]),
        tokens=torch.tensor([[2, 2, tokens]]),
        quantities={"confidence": torch.tensor([[0.875, 0.875, decided]], dtype=torch.float64)},
        **more,
    )
    return samplers.create(sampler, **settings).revise(view, candidates)


def test_wino_doubts_below_its_threshold() -> None:
    for shadow, doubted in zip(around(0.5), (False, False, True), strict=True):
        updates = {"shadow_confidence": torch.tensor([[1.0, 1.0, shadow]], dtype=torch.float64)}
        revision = revised("wino", {"threshold_back": 0.5}, 0.5, memory={"accepted": 2}, updates=updates)
        assert revision.remask.tolist() == [[False, False, doubted]]


def test_editing_exchanges_above_its_threshold() -> None:
    for score, edited in zip(around(0.5), (True, False, False), strict=True):
        for token in (1, 2):
            revision = revised("editing", {"editing_threshold": 0.5}, score, token, memory={"post_steps": 0})
            assert revision.edit.tolist() == [[False, False, edited and token != 1]]


def test_saber_commits_above_the_mean() -> None:
    """The mean of two tokens with 1 and 0.5 is 0.75."""
    for score, more in zip(around(0.75), (True, False, False), strict=True):
        memory = {"total": torch.tensor([1.5], dtype=torch.float64), "count": torch.tensor([2])}
        found = chosen("saber", [0.875, score], settings={"minimum": 1}, memory=memory)
        assert found == ([0, 1] if more else [0])


@pytest.mark.parametrize(("decided", "bar"), [(0, 4.0), (24, 4.0), (25, 2.0), (74, 2.0), (75, 1.0), (99, 1.0)])
def test_prophet_at_its_bars_and_stages(decided: int, bar: float) -> None:
    rule = paradec.Prophet(gaps=(4.0, 2.0, 1.0), stages=(0.25, 0.75))
    window = SimpleNamespace(rows=np.array([0]), undecided=lambda current, mask: current == mask)
    facts = SimpleNamespace(mask_token_id=3)
    state = SimpleNamespace(window=window, facts=facts, decided=np.array([decided]), total=np.array([100]))
    for gap, satisfied in zip(around(bar), (True, True, False), strict=True):
        gaps = torch.tensor([[gap, 100.0, gap]], dtype=torch.float64)
        proposal = SimpleNamespace(updates={WATCHED + "logit_gap": gaps}, current=torch.tensor([[3, 1, 3]]))
        assert rule.satisfied(state, proposal).tolist() == [satisfied]


def cut_of(policy: AdaptiveBlocks, confidence: list[float], tokens: list[int], answer: int, start: int = 0) -> int:
    """Length of the block that a row opens after a prompt of 3 positions."""
    size = len(tokens)
    opening = Opening(
        tokens=torch.tensor([tokens]),
        confidence=torch.tensor([confidence], dtype=torch.float64),
        available=torch.ones(1, size, dtype=torch.bool),
        start=np.array([3 + start]),
        prompt_length=np.array([3]),
        length=np.array([3 + answer]),
    )
    return int(policy.cut(opening))


def test_adaptive_blocks_at_their_threshold() -> None:
    policy = AdaptiveBlocks(length=4, delimiter_threshold=0.5, delimiters=(7,), window=0.5)
    for score, ends in zip(around(0.5), (True, True, False), strict=True):
        assert cut_of(policy, [0.9, score, 0.9, 0.9], [1, 7, 1, 1], 8) == (2 if ends else 4)
    # the leftmost of equally sure delimiters, and the most confident one wherever it stands
    assert cut_of(policy, [0.5, 0.75, 0.75, 0.5], [7, 7, 7, 7], 8) == 2
    # half of the answer is read: 4 positions of 9, and none after them is looked at
    assert cut_of(policy, [0.5] * 5, [1, 1, 1, 7, 1], 9) == 4
    policy = dataclasses.replace(policy, length=5)
    assert cut_of(policy, [0.75] * 5, [1, 1, 1, 1, 7], 9) == 5  # the default length, since the delimiter is not read
    assert cut_of(policy, [0.5, 0.625, 0.5, 0.5, 0.75], [1, 7, 1, 1, 7], 9) == 2
    policy = dataclasses.replace(policy, min_length=3)
    assert [cut_of(policy, [0.75] * 5, [7 if i == at else 1 for i in range(5)], 10) for at in range(5)] == [
        3, 3, 3, 4, 5
    ]  # fmt: skip


def test_adaptive_blocks_end_where_a_models_block_does() -> None:
    policy = AdaptiveBlocks(length=6, delimiters=(7,), window=1.0, model_block=4)
    for start in range(9):
        found = policy.open(np.array([3 + start]), np.array([3]), np.array([12]))
        at = 3 + start + 1
        while at % 4 and at < 12:
            at += 1
        assert found.tolist() == [at]


def test_equal_scores_go_to_the_lower_position() -> None:
    for name in ("threshold", "adablock", "credit", "localleap", "factor", "entropy_threshold", "entropy_bound",
                 "wino", "editing"):  # fmt: skip
        value = -3.0 if name.startswith("entropy") else 0.125
        assert chosen(name, [-INF, value - 0.125, value, value, value]) == [2], name
    for name, updates in (
        ("low_confidence", {}),
        ("margin", {}),
        ("entropy", {}),
        ("klass", {"stable": [0] * 5}),
        ("ccd", {"buffered": [False] * 5}),
    ):
        assert chosen(name, [-INF, 0.0, 0.125, 0.125, 0.125], 2, updates=updates) == [2, 3], name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_filters_at_their_limits(dtype: torch.dtype) -> None:
    """The token before which the mass is exactly `top_p` crosses it and stays."""

    def kept(logits: list[float], top_p: float | None, top_k: int | None = None) -> int:
        return int((filter_logits(torch.tensor([logits], dtype=dtype), top_p, top_k) > -INF).sum())

    assert [kept([1.0] * 4, share / 4) for share in (0.5, 1, 1.5, 2, 3)] == [1, 2, 2, 3, 4]
    assert [kept([3.0, 2.0, 2.0, 1.0], None, count) for count in (1, 2, 3, 4)] == [1, 3, 3, 4]
    # tokens that differ: the limit is the mass before a token, as it comes out in this precision
    logits = [2.0, 1.5, 0.5, 0.25, -1.0]
    distribution = torch.tensor(logits, dtype=dtype).softmax(-1)
    for rank, before in enumerate((distribution.cumsum(-1) - distribution).tolist()):
        assert not rank or kept(logits, before) == rank + 1
