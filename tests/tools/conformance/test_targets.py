"""What is asked of a target, what counts as an answer, and where a difference begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import asked, data, named, one

from paradec.cli.options import from_file
from paradec.tools.conformance.compare import Difference, difference
from paradec.tools.conformance.targets import Answer, BadAnswer, Command, checked, request
from paradec.tools.conformance.traces import changes

CASE = "llada/low_confidence_bl8_steps16/0"
TIE = "ties/threshold_1_bl8"
REQUEST = {"prompts": [[5, 6], [7]], "max_new_tokens": 2}


def recorded(name: str) -> Answer:
    """What agrees with a case of traces, by the recording."""
    case = named()[name]
    steps: list[list[tuple[int, int, int]]] = []
    for row, expected in enumerate(case.expected):
        assert expected.steps is not None
        for number, step in enumerate(expected.steps):
            steps += [[]] * (number + 1 - len(steps))
            steps[number] = steps[number] + [(row, at, token) for at, token in step.items()]
    return Answer([list(row.ids) for row in case.expected], steps)


def test_a_request_is_plain_data() -> None:
    for name in (
        CASE,
        TIE,
        "laws/temperature1_prompt0/speculative",
        "freedave/freedavepp_d2_thr0.9_batch_prefix_bl16/0",
    ):
        found = request(named()[name], data())
        assert json.loads(json.dumps(found)) == found
        assert (Path(found["checkpoint"]) / "config.json").is_file() and found["id"] == name
        assert "drafter" not in found["settings"] or (Path(found["settings"]["drafter"]) / "config.json").is_file()


def test_an_answer_is_checked() -> None:
    right = {"ids": [[5, 6, 1, 2], (7, 1, 2)], "steps": [[(0, 2, 1)], []]}
    assert checked(right, REQUEST) == Answer([[5, 6, 1, 2], [7, 1, 2]], [[(0, 2, 1)], []])
    assert checked({"ids": right["ids"]}, REQUEST).steps is None
    for wrong, message in [
        (None, "must be a mapping with 'ids'"),
        ({"steps": []}, "must be a mapping with 'ids'"),
        ({"ids": [[5, 6, 1, 2]]}, "must be 2 lists of ids"),
        ({"ids": [[5, 6, 1, 2], [8, 1, 2]]}, r"ids\[1\]=.* must begin with its prompt \[7\]"),
        ({"ids": [[5, 6, 1, 2], [7, 1]]}, r"ids\[1\] has 2 ids; prompt and answer are 3"),
        ({"ids": [[5, 6, 1.0, 2], [7, 1, 2]]}, r"ids\[0\]=.* whole numbers"),
        (right | {"steps": 3}, "steps=3 must be a list"),
        (right | {"steps": [3]}, r"steps\[0\]=3 must be a list"),
        (right | {"steps": [[], [[0, 2]]]}, r"steps\[1\] holds \[0, 2\]"),
        (right | {"steps": [[[2, 2, 1]]]}, r"steps\[0\] holds \[2, 2, 1\]"),
        (right | {"steps": [[[0, -1, 1]]]}, r"steps\[0\] holds \[0, -1, 1\]"),
    ]:
        with pytest.raises(BadAnswer, match=message):
            checked(wrong, REQUEST)


def test_what_a_target_does_not_do_is_no_difference() -> None:
    def missing(request: Any) -> Any:
        raise NotImplementedError("no blocks")

    def broken(request: Any) -> Any:
        raise KeyError("mask_id")

    assert (one(missing, CASE).status, one(missing, CASE).message) == ("not implemented", "no blocks")
    assert (one(broken, CASE).status, one(broken, CASE).message) == ("failed", "KeyError: 'mask_id'")
    assert one(lambda request: {}, CASE).status == "failed"
    laws = asked(missing, ["laws/temperature1_prompt0/sjd"])
    assert laws.outcomes[0].status == "not implemented" and not laws.passed


def test_a_function_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_decoder_of_mine.py").write_text("import math\n\ndef answer(request):\n    return request\n")
    for place in ("a_decoder_of_mine:answer", "a_decoder_of_mine.py:answer"):
        assert from_file("--target", place)({"a": 1}) == {"a": 1}
    for place, message in [
        ("a_decoder_of_mine", "FILE.py:NAME or MODULE:NAME"),
        ("a_decoder_of_mine:math", "no function or class 'math'"),
        ("a_decoder_of_nobody:answer", "No module named"),
    ]:
        with pytest.raises(ValueError, match=message):
            from_file("--target", place)


SERVER = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    kind = asked["id"]
    if kind == "ends":
        sys.exit(3)
    if kind == "sleeps":
        time.sleep(30)
    print({"missing": '{"not_implemented": "no rows"}', "fails": '{"error": "out of memory"}', "garbage": "hello",
           "list": "[1]"}.get(kind, json.dumps({"ids": asked.get("prompts")})), flush=True)
"""


def test_a_command_answers_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = Command(f"{sys.executable} {tmp_path / 'server.py'}", timeout=20)
    try:
        assert command({"id": "a", "prompts": [[1]]}) == {"ids": [[1]]}
        with pytest.raises(NotImplementedError, match="no rows"):
            command({"id": "missing"})
        with pytest.raises(RuntimeError, match="out of memory"):
            command({"id": "fails"})
        for kind in ("garbage", "list"):
            with pytest.raises(BadAnswer, match="is no JSON"):
                command({"id": kind})
        assert command({"id": "b", "prompts": [[2]]}) == {"ids": [[2]]}
        with pytest.raises(ValueError, match="has ended at ends"):
            command({"id": "ends"})
    finally:
        command.close()
    with pytest.raises(ValueError, match="could not be started"):
        Command("no-such-program-here", 1)
    with pytest.raises(ValueError, match="is empty"):
        Command(" ", 1)


def test_a_command_that_hangs_fails_the_cases_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER.replace('asked["id"]', '"sleeps"'))
    command = Command(f"{sys.executable} {tmp_path / 'server.py'}", timeout=0.5)
    try:
        found = asked(command, [CASE, TIE])
    finally:
        command.process.kill()
        command.close()
    assert [outcome.status for outcome in found.outcomes] == ["failed", "failed"] and not found.passed
    assert all("took longer than --timeout" in outcome.message for outcome in found.outcomes)


# ---- comparing -----------------------------------------------------------------------------------------------------


def test_only_changes_count() -> None:
    steps = [[(0, 2, 5), (1, 2, 9)], [], [(0, 2, 5)], [(0, 3, 6), (0, 9, 6)], [(0, 2, 7)]]
    assert changes(steps, 0, [1, 1, 0, 0] + [0] * 6, range(5)) == [{2: 5}, {3: 6}, {2: 7}]


def test_forwards_that_change_nothing_are_no_difference() -> None:
    answer = recorded(CASE)
    assert answer.steps is not None and difference(named()[CASE], answer) is None
    idle = [step for one in answer.steps for step in ([], one, one)]
    assert difference(named()[CASE], Answer(answer.ids, idle)) is None
    assert difference(named()[CASE], Answer(answer.ids, None)) is None


def test_the_first_difference_is_found() -> None:
    answer, case = recorded(CASE), named()[CASE]
    assert answer.steps is not None
    (row, at, token), *others = answer.steps[5]
    swapped = [*answer.steps[:5], [(row, at, token + 1), *others], *answer.steps[6:]]
    found = difference(case, Answer(answer.ids, swapped))
    assert found is not None and (found.step, found.position) == (5, at)
    assert (found.expected, found.found) == (token, token + 1)
    # a forward too many, at the end: the last one is cut in two
    *before, last = answer.steps
    found = difference(case, Answer(answer.ids, [*before, last[:1], last[1:]]))
    assert found is not None and (found.step, found.position, found.found) == (len(before), last[1][1], None)
    # the answer is whole, but not by the forwards that are said
    found = difference(case, Answer(answer.ids, before))
    assert found is not None and (found.step, found.found) == (len(before), None)
    # steps may agree and the answer not
    ids = [[*answer.ids[0][:-1], answer.ids[0][-1] - 1]]
    found = difference(case, Answer(ids, answer.steps))
    assert found == Difference(0, None, len(ids[0]) - 1, answer.ids[0][-1], ids[0][-1])


def test_what_the_reference_left_undecided_is_not_compared() -> None:
    """LLaDA2.0 stops at an end; a decoder that goes on agrees, one that differs before it does not."""
    name = "llada20_generate/b8_eos_in_prompt/0"
    case, answer = named()[name], recorded(name)
    (expected,) = case.expected
    undecided = [at for at in range(len(expected.ids)) if at not in expected.compared]
    assert undecided and answer.steps is not None
    on = [*answer.steps, [(0, at, 3) for at in undecided]]
    ids = [[3 if at in undecided else token for at, token in enumerate(expected.ids)]]
    assert difference(case, Answer(ids, on)) is None
    first = max(expected.compared)
    ids[0][first] += 1
    assert difference(case, Answer(ids, on)) is not None


def test_a_tie_is_compared_by_counts() -> None:
    """Whatever positions; with steps or the answer alone."""
    case = named()[TIE]
    everything = [[(0, at, 1) for at in range(2, 10)]]
    assert difference(case, Answer([[5, 6, *[1] * 8]], everything)) is None
    assert difference(case, Answer([[5, 6, *[1] * 8]], None)) is None
    one_by_one = [[(0, at, 1 if number < 4 else 3)] for number, at in enumerate((4, 2, 9, 3, 8, 5, 7, 6))]
    ids = [5, 6, *(token for _, token in sorted((at, token) for ((_, at, token),) in one_by_one))]
    for answer in (Answer([ids], one_by_one), Answer([ids], None)):
        found = difference(case, answer)
        assert (
            found is not None
            and "it compares confidence > threshold, the method compares confidence >= threshold" in found.what
        )
    half = named()["ties/threshold_0.5_bl8"]
    twins = [[(0, at, 1 + at % 2) for at in range(2, 10)]]
    assert difference(half, Answer([[5, 6, *[1, 2] * 4]], twins)) is None
    assert difference(case, Answer([[5, 6, *[1, 2] * 4]], twins)) is not None
