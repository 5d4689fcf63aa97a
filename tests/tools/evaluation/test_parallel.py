"""The bench of parallel decoding: prompts in plain words and their judges, equal numbers of settings, the command."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paradec
from paradec import cli, samplers
from paradec.tools.evaluation import parallel as benches
from paradec.tools.evaluation.metrics import aup
from paradec.tools.evaluation.parallel import SWEEPS, parallel, parallel_questions, sweep
from paradec.tools.evaluation.questions import Question, packaged_questions
from paradec.tools.evaluation.waiting_line import NAMES, waiting_line_questions

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]


# ---- prompts --------------------------------------------------------------------------------------------------------


def asked(question: Question) -> tuple[list[str], str]:
    """The line of a prompt, and what is asked of it."""
    last = question.prompt.rsplit("Line: ", 1)[1].splitlines()
    return json.loads(last[0]), last[1]


def accepted(task: str, line: list[str], said: str, answer: list[str]) -> bool:
    """ParallelBench's own judgements, in its words."""
    number = re.search(r"has (\d+) people|are (\d+) people", said)
    index = int(next(filter(None, number.groups()))) if number else -1
    match = re.search(r"Put (\w+ \w+) ", said)
    word = match[1] if match else ""
    if task == "copy":
        return answer == line
    if task == "reverse":
        return answer == line[::-1]
    if task == "sort":
        return answer == sorted(line)
    if task == "shuffle":
        return Counter(answer) == Counter(line) and answer != line
    if task == "insert_at":
        return answer == line[:index] + [word] + line[index:]
    if task == "insert_random":  # without the word it is the line
        return answer.count(word) == 1 and [person for person in answer if person != word] == line
    if task == "remove_at":
        return answer == line[:index] + line[index + 1 :]
    if task == "remove_random":  # one person less, in the order of the line
        return len(answer) == len(line) - 1 and any(line[:k] + line[k + 1 :] == answer for k in range(len(line)))
    if task == "replace_at":
        return answer == line[:index] + [word] + line[index + 1 :]
    where = answer.index(word) if answer.count(word) == 1 else -1
    return where >= 0 and len(answer) == len(line) and line[:where] + [word] + line[where + 1 :] == answer


@pytest.mark.parametrize("task", NAMES[:-1])
def test_lines_are_judged_as_parallelbench_does(task: str) -> None:
    questions = waiting_line_questions(task, per_length=2)
    assert sorted(len(asked(question)[0]) for question in questions) == [3, 3, 4, 4, 5, 5, 6, 6]
    seen: set[bool] = set()
    for question in questions[:4]:
        line, said = asked(question)
        match = re.search(r"Put (\w+ \w+) ", said)
        people = [*line, match[1]] if match else line
        for size in range(len(line) - 1, len(line) + 2):
            for answer in itertools.permutations(people, min(size, len(people))):
                expected = accepted(task, line, said, [*answer])
                assert question.right(json.dumps([*answer])) is expected, (line, said, answer)
                seen.add(expected)
    assert seen == {True, False}


def test_what_stands_around_a_list() -> None:
    lenient, strict = (waiting_line_questions("copy", 1, strict=strict)[0] for strict in (False, True))
    line = json.dumps(asked(lenient)[0])
    for text, right in (
        (line, (True, True)), (f"Answer: {line}.", (True, False)), (line[:-1], (True, False)),
        (f'The "new" line is {line}, "I think"', (True, False)),
    ):  # fmt: skip
        assert (lenient.right(text), strict.right(text)) == right, text
    for text in ("", "[]", "[[[", line.replace('"', ""), json.dumps([*asked(lenient)[0], ""])):
        assert not lenient.right(text) and not strict.right(text)


def test_squares() -> None:
    (question,), (strict,) = (waiting_line_questions("latin_square", 1, strict=strict) for strict in (False, True))
    a, b, c, d = question.prompt.rsplit("Symbols: ", 1)[1].splitlines()[0].split(", ")
    square = [[a, b, c, d], [b, a, d, c], [c, d, a, b], [d, c, b, a]]
    text = "\n".join(",".join(line) for line in square)
    assert question.right(text) and strict.right(text)
    around = f"Here it is:\n{text}\nDone, I hope"
    assert question.right(around) and not strict.right(around)
    assert question.right(f"{text}\n{d},{c},{b},{a}"), "the first square counts"
    assert not question.right(text.replace(f"{a},{b}", f"{b},{a}", 1))
    assert not question.right("\n".join(text.splitlines()[:3]))


def test_prompts_are_the_same_every_time_and_no_two_alike() -> None:
    first, again = waiting_line_questions(), waiting_line_questions()
    assert [q.prompt for q in first] == [q.prompt for q in again]
    assert len({q.prompt for q in first}) == len(first) == 11 * 100
    assert Counter(q.task for q in first) == dict.fromkeys(NAMES, 100)
    few = waiting_line_questions(limit=4)
    assert [len(asked(q)[0]) for q in few if q.task == "copy"] == [3, 4, 5, 6], "spread over the lengths"
    for question in (q for q in first[::7] if q.task != "latin_square"):  # the worked example is right
        line, said, answer = question.prompt.split("Line: ")[1].splitlines()[:3]
        assert accepted(question.task, json.loads(line), said, json.loads(answer.removeprefix("Answer: ")))
    with pytest.raises(ValueError, match="unknown task of ParallelBench: 'rotations'"):
        waiting_line_questions("rotations")
    with pytest.raises(ValueError, match="per_length=0"):
        waiting_line_questions(per_length=0)


def test_the_packaged_form_has_the_same_tasks() -> None:
    assert {q.task for q in parallel_questions("packaged", limit=1)} == {*NAMES}
    with pytest.raises(ValueError, match="form"):
        parallel_questions("short")
    with pytest.raises(ValueError, match="task"):
        parallel_questions("packaged", "rotations")


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [2, 3, 5])
@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_are_equal_in_number(name: str, settings: int) -> None:
    found = sweep(name, settings)
    assert len({c.name for c in found}) == settings and found[0].changes == {}
    swept = sweep(name, 5)
    if name == "threshold":
        values = sorted(c.make().threshold for c in swept)
        assert (values[0], values[-1], len(set(values))) == (0.5, 1.0, 5)
    elif name == "factor":
        assert sorted(c.make().factor for c in swept) == [0.7, 1.0, 1.3, 1.6, 1.9]
    else:
        assert sorted(c.request(32).get("steps", 32) for c in swept) == [2, 4, 8, 16, 32]


@pytest.mark.parametrize("name", MASKED)
def test_every_masked_sampler_has_three_settings(name: str) -> None:
    assert len({c.name for c in sweep(name, 3)}) == 3


def test_settings_that_are_not_there() -> None:
    assert len(sweep("credit", 5)) == 5
    with pytest.raises(ValueError, match="'klass' has 3 settings to sweep, not 5"):
        sweep("klass", 5)
    with pytest.raises(ValueError, match="family 'draft_verify'"):
        sweep("sjd")
    with pytest.raises(ValueError, match="settings=6"):
        sweep("threshold", 6)


def test_areas_lie_under_equal_numbers_of_points() -> None:
    found = parallel(
        names=["low_confidence", "credit"], settings=3, tasks=["copy", "shuffle"], limit=2, batch=4, max_new_tokens=12
    )
    counts = Counter(result.configuration.sampler for result in found.results)
    assert counts == {"threshold": 3, "low_confidence": 3, "credit": 3}
    best = max(100 * result.accuracy() for result in found.results)
    for name, area in found.aup().items():
        own = [result for result in found.results if result.configuration.sampler == name]
        assert area == aup([(r.tokens_per_forward, 100 * r.accuracy()) for r in own], best)
    assert set(found.aup()) == set(counts) and found.many == {"copy": False, "shuffle": True}


def test_what_the_model_does_not_serve_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "compare", lambda *_, **__: pytest.fail("decoded"))
    model = paradec.load()
    with pytest.raises(ValueError, match="prompt of"):
        parallel(model, max_new_tokens=5000, tasks="copy", form="packaged")
    monkeypatch.setattr(benches, "compare", lambda *_, **request: request["max_new_tokens"])
    monkeypatch.setattr(benches, "parallel_questions", lambda *_: packaged_questions("copy", 1))
    for form, asked_for, new in (("names", None, 64), ("names", 9, 9), ("packaged", None, None)):
        short = {"names": ["threshold"], "tasks": "copy", "limit": 1, "max_new_tokens": asked_for}
        assert parallel(model, form=form, **short) == new


def test_the_command(tmp_path: Path) -> None:
    out, plot = tmp_path / "found.json", tmp_path / "curve.svg"
    given = ["bench", "parallel", "--samplers", "factor", "--settings", "2", "--tasks", "sort,shuffle", "--limit", "2"]
    given += ["--max-new-tokens", "12", "--batch", "4", "--out", str(out), "--plot", str(plot)]
    shown = CliRunner().invoke(cli.app, given)
    assert shown.exit_code == 0, shown.output
    found = json.loads(out.read_text())
    assert found["complete"] and set(found["aup"]) == {"threshold", "factor"} and len(found["results"]) == 4
    assert "tokens per forward" in plot.read_text() or plot.stat().st_size > 1000
    wrong = CliRunner().invoke(cli.app, ["bench", "parallel", "--samplers", "klass"])
    assert wrong.exit_code == 2 and "ask for fewer of all" in wrong.stderr
