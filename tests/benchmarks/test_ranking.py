"""The ranking's own parts: what is measured again, and what stands above what."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from scripts import load_script

import paradec
from paradec.tools.tuning.measuring import Measured

ranking = load_script("benchmarks/ranking.py")


def row(
    name: str, kind: str, score: float, forwards: float, positions: float = 1.0, cpu: float = 1.0
) -> dict[str, Any]:
    return {"name": name, "kind": kind, "score": score, "forwards": forwards, "positions": positions, "cpu": cpu}


def test_each_kind_is_chosen_among_those_before_it() -> None:
    rows = [
        row("base", "today", 0.95, 3.0),
        row("fast", "today", 0.92, 2.5),
        row("behind", "today", 0.91, 2.6),  # worse than `fast`
        row("lossy", "today", 0.80, 1.0),  # too far below the baseline
        row("knob", "knobs", 0.94, 2.9),
        row("idle", "knobs", 0.92, 2.7),  # worse than `fast`, of another kind
        row("new", "new", 0.95, 2.4),  # hides neither `fast` nor `knob`
        row("late", "new", 0.93, 2.45),  # worse than `new`
        row("again", "new", 0.95, 2.4),  # as `new`
        row("small", "new", 0.91, 9.0, positions=0.5),
        row("quick", "new", 0.92, 9.0, cpu=0.5),
    ]
    assert ranking.chosen(rows, "base") == ["base", "fast", "knob", "new", "small", "quick"]


def test_the_baseline_is_always_reported() -> None:
    rows = [row("base", "today", 0.9, 3.0, 2.0, 2.0), row("better", "today", 0.95, 2.0)]
    assert ranking.chosen(rows, "base") == ["base", "better"]


def reported(
    name: str,
    kind: str,
    score: list[float],
    forwards: list[int],
    turns: list[float],
    positions: list[float] | None = None,
) -> Any:
    entry = ranking.Entry(kind, ranking.Configuration(name))
    measured = Measured(
        score, [None] * len(score), forwards, positions or [4.0 * k for k in forwards], [0.0] * len(score)
    )
    return ranking.Reported(entry, measured, turns)


def ranked(*rows: Any) -> Any:
    count = len(rows[0].measured)
    return ranking.Ranking(list(rows), [str(k) for k in range(count)], [str(k // 5) for k in range(count)])


ALL = [1.0] * 40
MOST = [0.0, 1.0] * 2 + [1.0] * 36
HALF = [0.0, 1.0] * 20


def test_above_is_clearly_cheaper_than_all_that_are_not_clearly_worse() -> None:
    base = reported("threshold", "today", ALL, [4] * 40, [2.0, 2.2])
    poor = reported("credit", "today", HALF, [1] * 40, [0.5, 0.5])
    new = reported("factor", "new", ALL, [3] * 40, [1.5, 2.0])
    found = ranked(base, poor, new)
    assert found.worse(poor, new) and not found.worse(new, base)
    assert all(found.above(new, ("today",), cost) for cost in ranking.COSTS)  # the poor one is cheaper, and worse
    assert found.nearest(new, ("today",), "forwards") is base
    [*_, told] = found.to_data()
    assert told["against"]["today"]["forwards"] == {"above": True, "nearest": "threshold", "ratio": 0.75}
    assert told["versus_baseline"] == [0.0, 0.0, 0.0]


def test_nothing_stands_above_a_cheaper_one_that_is_not_clearly_worse() -> None:
    base = reported("threshold", "today", ALL, [4] * 40, [2.0, 2.2])
    like = reported("credit", "today", MOST, [2] * 40, [1.0, 1.0])
    new = reported("factor", "new", ALL, [3] * 40, [1.5, 2.0])
    found = ranked(base, like, new)
    assert found.difference(like, new, "score")[0] == -0.05 and not found.worse(like, new)
    assert not any(found.above(new, ("today",), cost) for cost in ranking.COSTS)
    assert found.nearest(new, ("today",), "cpu") is like


def test_costs_that_are_not_clear_are_not_above() -> None:
    base = reported("threshold", "today", ALL, [3, 5] * 20, [2.0, 2.0], [9.0] * 40)
    new = reported("factor", "new", ALL, [5, 3] * 19 + [3, 3], [1.5, 2.1], [8.0] * 40)
    found = ranked(base, new)
    assert not found.above(new, ("today",), "forwards")  # fewer, and not on one side of zero
    assert not found.above(new, ("today",), "cpu")  # one turn of two
    assert found.above(new, ("today",), "positions")


def test_knobs_count_where_they_are_asked_for() -> None:
    base = reported("threshold", "today", ALL, [4] * 40, [2.0])
    knob = reported("credit", "knobs", ALL, [2] * 40, [1.0])
    new = reported("factor", "new", ALL, [3] * 40, [1.5])
    found = ranked(base, knob, new)
    assert found.above(new, ("today",), "cpu") and not found.above(new, ("today", "knobs"), "cpu")


def test_positions_are_drawn_by_batches() -> None:
    """Their values are a batch's mean, so that prompts would be drawn as if they were eight times as many."""
    base = reported("threshold", "today", ALL, [4] * 40, [1.0], [10.0] * 40)
    new = reported("factor", "new", ALL, [4] * 40, [1.0], [9.0] * 20 + [10.9] * 20)
    found = ranked(base, new)
    mean, low, high = found.difference(new, base, "positions")
    assert mean == pytest.approx(-0.05) and low < -0.6 and high > 0.5


def test_halves_share_no_prompt_and_every_task_chooses() -> None:
    for slots in (64, 256):
        place = ranking.packaged(slots)
        first, second = ({asked.prompt for asked in half} for half in place.halves)
        assert not first & second
        for asked in (place.halves[0][: place.choosing], place.halves[1], place.halves[1][: place.timed]):
            counts = {task: sum(each.task == task for each in asked) for task in {each.task for each in asked}}
            assert len(counts) == 15 and len({*counts.values()}) == 1
        assert len(place.halves[1]) % place.batch == place.choosing % place.batch == place.timed % place.batch == 0


def test_what_is_reported_is_the_other_half() -> None:
    place = ranking.packaged(64)
    first, second = ([replace(a, right=lambda _, k=k: k) for a in half[:4]] for k, half in enumerate(place.halves))
    place = replace(place, halves=(first, second), choosing=4, timed=2, batch=2)  # those that choose are never right
    place.entries = [place.entries[0], ranking.Entry("new", ranking.BASELINE, {"suffix": "16"})]
    place.entries.append(ranking.Entry("new", ranking.BASELINE, {"suffix": "16", "cache": "delayed"}))
    found = ranking.measure(place)
    assert [row["score"] for row in found["choosing"]] == [0.0, 0.0]
    assert {row["name"]: row["score"] for row in found["reported"]} == {"threshold": 1.0, "threshold, suffix 16": 1.0}
    assert [*found["refused"]] == ["threshold, suffix 16, cache delayed"]
    for row in found["reported"]:
        assert len(row["cpu_turns"]) == ranking.TURNS and min(row["cpu_turns"]) > 0
    base, fewer = found["reported"]
    assert base["forwards"] == fewer["forwards"] and base["positions"] > 1.1 * fewer["positions"]


def test_every_candidate_of_text_can_be_decoded() -> None:
    place = ranking.packaged(64)
    assert place.entries[0].name == "threshold" and place.entries[0].kind == "today"
    assert {entry.kind for entry in place.entries} == {"today", "knobs", "new"}
    prompt = place.halves[0][0].prompt
    for entry in place.entries:
        request = place.request(entry)
        request.sampler.start(place.model, prompt, request)
        fresh = {"suffix"} & {*entry.more} or entry.more.get("cache") in ("d2", "delayed")
        fresh = fresh or isinstance(entry.more.get("blocks"), paradec.PipelinedBlocks)
        fresh = fresh or entry.configuration.sampler == "lopa" or "profile" in entry.configuration.changes
        assert (entry.kind == "new") == bool(fresh), entry.name


def test_steps_are_a_share_of_the_blocks_that_there_are() -> None:
    schedule = ranking.Configuration("topk_margin", {"steps": 1 / 8})
    assert ranking.Entry("today", schedule).request(64, 32).steps == 8
    own = ranking.Entry("knobs", schedule, {"blocks": paradec.FixedBlocks(16)})
    assert own.request(104, 512).steps == 14  # seven blocks, two steps each


@pytest.mark.skipif(importlib.util.find_spec("antiberty") is None, reason="needs antiberty")
def test_antibodies_stay_whole_in_their_half() -> None:
    place = ranking.antibody()
    first, second = ({asked.group for asked in half} for half in place.halves)
    assert not first & second and (len(place.halves[0]), len(place.halves[1])) == (32, 20)
    assert not any({"suffix", "cache"} & {*entry.more} for entry in place.entries)
