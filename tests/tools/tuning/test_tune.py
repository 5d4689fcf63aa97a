"""`paradec.tune` and its command: measurements, halves, presets, resumption and errors."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from decoding import refuses
from places import ROOT, SUPPORT
from small_models import END, MASK, tiny
from typer.testing import CliRunner

import paradec
from paradec.cli import app
from paradec.models.adapter import Model
from paradec.samplers.masked.rules.low_confidence import LowConfidence
from paradec.tools.evaluation import configurations
from paradec.tools.tuning import Tuning
from paradec.tools.tuning.halving import is_promoted, rungs
from paradec.tools.tuning.prompts import split_halves, to_questions
from paradec.tools.tuning.scoring import PromptHalf


def wait_for(file: Path, trials: int, process: subprocess.Popen[str], seconds: float = 300) -> None:
    """Wait until a process has finished `trials` trials. It must not end earlier or take longer than `seconds`."""
    end = time.monotonic() + seconds
    while len(finished_trials(file)) < trials:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{len(finished_trials(file))} trials after {seconds} s"
        time.sleep(0.5)  # `finished_trials` locks the file


def finished_trials(file: Path) -> list[Any]:
    if not file.exists():
        return []
    try:
        study = optuna.load_study(study_name="paradec", storage=f"sqlite:///{file}")
    except KeyError:
        return []
    return [trial for trial in study.trials if trial.state.is_finished()]


PROMPTS = [[k, 7 * k % 39, (3 * k + 1) % 39][: 1 + k % 3] for k in range(1, 21)]
"""Prompts of one to three tokens."""
SMALL: dict[str, Any] = {
    "samplers": ["threshold", "factor", "low_confidence"], "blocks": [None], "max_new_tokens": 6, "trials": 3,
    "batch": 4, "seed": 1, "loss": 100,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(1)


@pytest.fixture(scope="module")
def answers(model: Model) -> list[list[int]]:
    """Return right answers: those of one token per step, with every second id changed in a third of the prompts."""
    result = []
    for k, prompt in enumerate(PROMPTS):
        out = paradec.generate(model, prompt, sampler="low_confidence", max_new_tokens=6)
        ids = out.new_tokens[0, : out.tokens[0]].tolist()
        result.append([(i + j % 2) % 39 if k % 3 == 0 else i for j, i in enumerate(ids)])
    return result


@pytest.fixture(scope="module")
def tuned(model: Model, answers: list[list[int]]) -> Tuning:
    return paradec.tune(model, PROMPTS, answers=answers, **SMALL)


@pytest.fixture(scope="module")
def by_hand(model: Model, answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    file = tmp_path_factory.mktemp("study") / "study.db"
    return file, paradec.tune(model, PROMPTS, answers=answers, study=file, **{**SMALL, "trials": 0})


def score_answer(model: Model, preset: Any, prompt: list[int], answer: list[int]) -> tuple[float, int]:
    out = paradec.generate(model, prompt, preset=preset, seed=SMALL["seed"])
    ids = out.new_tokens[0, : out.tokens[0]].tolist()
    return sum(a == b for a, b in zip(ids, answer)) / max(len(ids), len(answer)), out.row_nfe[0]


def without_times(data: Any) -> Any:
    """Return a result as data, without measured times."""
    data = data.to_dict() if isinstance(data, Tuning) else data
    if isinstance(data, dict):
        return {name: without_times(value) for name, value in data.items() if name != "seconds"}
    return [without_times(value) for value in data] if isinstance(data, list) else data


def test_reported_scores_match_the_preset(model: Model, answers: list[list[int]], tuned: Tuning) -> None:
    right = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers)}
    first, second = split_halves(to_questions(PROMPTS, answers), SMALL["seed"])
    assert tuned.complete and tuned.setup["score"] == "answers" and len(tuned.points) > 1
    for point in tuned.points:
        for half, measured in ((first, point.choosing), (second, point.reported)):
            assert measured is not None
            expected = [score_answer(model, point.request, entry.prompt, right[tuple(entry.prompt)]) for entry in half]
            assert list(zip(measured.score, measured.forwards)) == expected
            assert measured.truth == measured.score
    assert tuned.reference is not None
    request = paradec.Request(sampler="low_confidence", max_new_tokens=6)
    expected = [score_answer(model, request, entry.prompt, right[tuple(entry.prompt)]) for entry in second]
    assert list(zip(tuned.reference.score, tuned.reference.forwards)) == expected


def test_the_choice_is_no_worse_than_hand_set_candidates(model: Model, answers: list[list[int]], tuned: Tuning) -> None:
    first, _ = split_halves(to_questions(PROMPTS, answers), SMALL["seed"])
    right = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers)}
    rows = {}
    for configuration in configurations(SMALL["samplers"]):
        if configuration.name == "low_confidence":
            continue  # one token per step
        request = paradec.Request(sampler=configuration.make(), max_new_tokens=6, **configuration.request(6))
        actual = [score_answer(model, request, entry.prompt, right[tuple(entry.prompt)]) for entry in first]
        rows[configuration.name] = tuple(sum(values) / len(values) for values in zip(*actual))
    best = max(score for score, _ in rows.values())
    forwards, score = min((forwards, -score) for score, forwards in rows.values() if score >= best - 0.01)
    assert tuned.hand is not None and tuned.hand.name in rows and tuned.hand.by_hand
    assert tuned.hand.choosing.point(("forwards",)) == pytest.approx((-score, forwards))
    chosen = tuned.points[tuned.chosen or 0]
    assert chosen.choosing.mean("forwards") <= forwards and chosen.choosing.mean("score") >= -score - 1e-9
    assert tuned.preset == chosen.request
    values = [point.choosing.point(("forwards",)) for point in tuned.points]
    assert values == sorted(values, key=lambda value: value[1])
    for point, a in zip(tuned.points, values):
        beaten = any(b[0] >= a[0] and b[1] <= a[1] and b != a for b in values)
        assert not beaten or point is chosen
    assert f"{tuned.hand.name} (the best set by hand)" in str(tuned)


def test_hand_set_candidates_are_always_measured(by_hand: tuple[Path, Tuning]) -> None:
    _, actual = by_hand
    assert actual.complete and actual.trials["measured"] == 8 and actual.trials["refused"] == 0
    assert all(point.by_hand for point in actual.points) and actual.hand is actual.points[actual.chosen or 0]


def test_hand_set_candidates_are_never_stopped_early(model: Model) -> None:
    """Rungs have 8 and 24 prompts. No answer is right, so candidates of two forwards rank behind those of one."""
    prompts = [[a, b] for a in range(4) for b in range(12)]
    schedules = ["low_confidence", "entropy", "margin", "topk_margin", "random", "origin"]
    arguments = {**SMALL, "samplers": schedules, "trials": 0}
    actual = paradec.tune(model, prompts, answers=[[a] * 3 for a, _ in prompts], **arguments)
    assert rungs(24, 3) == [8, 24] and actual.trials["measured"] == 12 and actual.trials["stopped early"] == 0
    measured = [(0.0, 1.0)] * 6 + [(0.0, 2.0)] * 5
    assert not is_promoted((0.0, 2.0), measured, 3, 1.0), "as proposals some would have been stopped"


def test_candidates_of_one_token_per_step_are_refused(model: Model) -> None:
    two = {**SMALL, "samplers": ["low_confidence", "threshold"]}
    actual = paradec.tune(model, PROMPTS, **{**two, "max_new_tokens": 1})
    assert actual.trials["refused"] >= 2 and {point.candidate.sampler for point in actual.points} == {"threshold"}
    assert actual.trials["measured"] == 3 + 3  # hand-set and proposed; refused candidates use no trial
    actual = paradec.tune(model, PROMPTS, **two)
    assert actual.setup["score"] == "agreement"
    for point in actual.points:
        request = point.request
        assert not isinstance(request.sampler, LowConfidence) or request.steps is not None and request.steps < 6
    assert actual.reference is not None and set(actual.reference.score) == {1.0}
    assert "agreement too" in str(actual) and "(itself)" in str(actual)


def test_the_batch_size_does_not_change_scores(model: Model, answers: list[list[int]], tuned: Tuning) -> None:
    batched = paradec.tune(model, PROMPTS, answers=answers, **{**SMALL, "batch": 7})
    actual, expected = (
        [(p.name, p.choosing.score, p.choosing.forwards) for p in result.points] for result in (batched, tuned)
    )
    assert actual == expected


def test_presets_are_requests_for_every_entry_point(model: Model, tuned: Tuning, tmp_path: Path) -> None:
    for number, point in enumerate(tuned.points, 1):
        tuned.save(tmp_path / "p.json", number)
        loaded = paradec.Request.load(tmp_path / "p.json")
        assert loaded.sampler == point.request.sampler and loaded.max_new_tokens == 6 and loaded.seed is None
        a, b = (paradec.generate(model, [1, 2], preset=preset) for preset in (tmp_path / "p.json", point.request))
        assert a.new_tokens.tolist() == b.new_tokens.tolist() and a.row_nfe == b.row_nfe
    with pytest.raises(ValueError, match="point=99"):
        tuned.save(tmp_path / "p.json", 99)


def test_holes_are_filled_and_judged(model: Model) -> None:
    prompts = [[1, MASK, k, MASK, 2, MASK] for k in range(12)]
    truths = []
    for row in prompts:
        out = paradec.generate(model, row, sampler="low_confidence")
        truths.append(out.sequences[0][out.filled[0]].tolist())
    actual = paradec.tune(model, prompts, answers=truths, suppress_tokens=[END], **{**SMALL, "max_new_tokens": 0})
    assert actual.reference is not None and actual.by_truth
    assert actual.reference.forwards == [3] * 6 and all(len(t) == 3 for t in truths)
    assert max(actual.reference.score) > 0.6, "the right answers were decoded with one token per step"
    assert actual.preset.suppress_tokens == (END,)


def test_seconds_caches_and_two_prompts(model: Model) -> None:
    actual = paradec.tune(model, [[1], [2]], **{**SMALL, "samplers": ["threshold"], "trials": 2}, objective="both")
    assert actual.costs == ("forwards", "seconds") and actual.setup["prompts"]["choose"] == 1
    assert "none" in actual.setup["space"]["caches"]["threshold"]
    assert len(actual.setup["space"]["caches"]["threshold"]) > 3
    assert actual.default is not None and actual.default.choosing.seconds[0] > 0


def test_temperature_and_seeds_come_from_the_request(model: Model) -> None:
    request = {**SMALL, "trials": 2, "temperature": 0.7, "top_k": 5}
    first, second = (paradec.tune(model, PROMPTS[:8], **request) for _ in range(2))
    assert without_times(first) == without_times(second)
    assert first.preset.temperature == 0.7 and first.preset.top_k == 5 and first.preset.seed is None


@pytest.mark.parametrize("call", [9, *(pytest.param(call, marks=pytest.mark.full) for call in (3, 17))])
def test_interrupted_studies_resume_without_repeated_work(
    model: Model, answers: list[list[int]], tuned: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    file, counts, calls, plain_decode = tmp_path / "study.db", [], itertools.count(1), PromptHalf.decode

    def decode(half: PromptHalf, request: Any, first: int, stop: int) -> Any:
        counts.append(stop - first)
        return plain_decode(half, request, first, stop)

    monkeypatch.setattr(PromptHalf, "decode", decode)
    paradec.tune(model, PROMPTS, answers=answers, **SMALL)
    num_prompts = sum(counts)
    counts.clear()

    def stop(what: str, share: float) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paradec.tune(model, PROMPTS, answers=answers, study=file, progress=stop, **SMALL)
    partial = caught.value.output
    assert not partial.complete and all(point.reported is None for point in partial.points)
    assert "Incomplete" in str(partial) and all(len(line) <= 80 for line in str(partial).splitlines())
    for _ in range(2):
        repeated = paradec.tune(model, PROMPTS, answers=answers, study=file, **SMALL)
        assert without_times(repeated) == without_times(tuned)
        assert sum(counts) == num_prompts, "finished rungs and batches are not decoded again"


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 2}, "seed: 1 in the study, 2 in this call"),
        ({"max_new_tokens": 7}, "request of 'max_new_tokens': 6 in the study, 7 in this call"),
        ({"samplers": ["threshold"]}, "space of 'samplers' of 'factor'"),
        ({"objective": "both"}, "objective: 'forwards' in the study, 'both' in this call|directions"),
        ({"score": "agreement"}, "score"),
        ({"prompts": PROMPTS[:-1]}, "prompts of 'choose'|prompts of 'report'"),
        ({"answers": [[1]] * 20}, "prompts of 'text'"),
        ({"model": tiny(1, seed=9)}, "weights"),
    ],
)
def test_a_study_with_other_settings_is_refused(
    model: Model, answers: list[list[int]], by_hand: tuple[Path, Tuning], change: dict[str, Any], word: str
) -> None:
    prompts = change.get("prompts", PROMPTS)
    defaults = {"model": model, "prompts": prompts, "answers": answers[: len(prompts)], "study": by_hand[0]}
    refuses(lambda: paradec.tune(**{**SMALL, "trials": 0, **defaults, **change}), word)


def test_failing_settings_are_reported_and_the_study_continues(model: Model, answers: Any, monkeypatch: Any) -> None:
    def fail(self: Any, view: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(paradec.samplers.get("factor"), "select", fail)
        actual = paradec.tune(model, PROMPTS, answers=answers, **SMALL)
    assert actual.trials["failed"] >= 3 and any("factor: out of memory" in reason for reason in actual.failures)
    assert "Failed: factor" in str(actual)
    assert {point.candidate.sampler for point in actual.points} <= {"threshold", "low_confidence"}


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from small_models import tiny
import paradec
prompts = [[k % 39, (7 * k + k // 39) % 39] for k in range(60)]
print("ready", flush=True)
paradec.tune(tiny(3), prompts, answers=[[k % 5] * 8 for k in range(60)], samplers=["threshold", "factor", "klass"],
             max_new_tokens=24, trials=int(sys.argv[2]), study=sys.argv[1], batch=2)
print("done", flush=True)
"""


def start(file: Path, trials: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT.format(tests=str(SUPPORT)), str(file), str(trials)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.full
def test_two_processes_continue_the_study_of_a_killed_one(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    killed = start(file, 6)
    wait_for(file, 4, killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {trial.number: trial.user_attrs for trial in finished_trials(file)}
    assert 4 <= len(before) < 15
    for process in [start(file, 6) for _ in range(2)]:
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and "done" in out
    after = {trial.number: trial for trial in finished_trials(file)}
    assert all(after[number].user_attrs == attributes for number, attributes in before.items())
    counted = [trial for trial in after.values() if "refused" not in trial.user_attrs]
    starts = [trial for trial in counted if "start" in trial.user_attrs]
    assert {trial.user_attrs["start"] for trial in starts} == set(range(9))
    assert len(starts) <= 10, "both processes may start the same first trial"
    assert 6 <= len(counted) - len(starts) <= 7, "both processes may start the last trial"
    study = optuna.load_study(study_name="paradec", storage=f"sqlite:///{file}")
    assert not [trial for trial in study.trials if trial.state.name == "RUNNING"]


SHORT = ["--samplers", "threshold,factor", "--trials", "1", "--blocks", "own", "--max-new-tokens", "16"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_a_preset_from_a_file_of_prompts(tmp_path: Path) -> None:
    prompts, preset, report = (tmp_path / name for name in ("own.jsonl", "preset.json", "report.json"))
    words = ("pear", "fig", "apple", "kiwi")
    lines = [{"prompt": f"Reverse: {a} {b}", "answer": f"{b} {a}"} for a in words for b in words if a != b]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    result = run("--prompts", prompts, "--out", preset, "--report", report, *SHORT)
    assert result.exit_code == 0, result.output
    assert "chosen on 6 prompts, by answers; 6 others reported" in result.stdout
    assert "Chosen on only 6 prompts" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    actual = json.loads(report.read_text())
    assert actual["complete"] and actual["trials"]["failed"] == 0
    chosen = next(point for point in actual["points"] if point["chosen"])
    assert json.loads(preset.read_text()) == chosen["preset"] and f"preset {str(preset)!r}" in result.stderr
    repeated = CliRunner().invoke(app, ["generate", "Reverse: pear fig", "--preset", str(preset), "--json"])
    expected = json.loads(repeated.stdout)
    out = paradec.generate(paradec.load(), "Reverse: pear fig", preset=preset)
    assert expected["text"] == out.text and expected["nfe"] == out.nfe


def test_a_checker_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(prompt, answer):\n    return 1 / (1 + len(answer))\n")
    result = run("--limit", "1", "--checker", f"{tmp_path / 'mine.py'}:short", "--json", *SHORT)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["setup"]["checker"] == "short"


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--blocks", "x"], "--blocks 'x'"),
        (["--checker", "nothing"], "must be FILE.py:NAME"),
        (["--checker", "nothing.py:f"], "is not a file"),
        (["--checker", "json:nothing"], "has no function or class 'nothing'"),
        (["--study", "/nowhere/x.db"], "cannot write --study"),
        (["--out", "/nowhere/x.json"], "cannot write --out"),
        (["--point", "0"], "'--point'"),
        (["--budget", "3"], "--budget needs --pipeline"),
        (["--pipeline", "digits-dit", "--mask", "x"], "--mask is not for --pipeline"),
        (["--pipeline", "digits-ar"], "is not a diffusers pipeline"),
        (["--pipeline", "digits-dit", "--budget", "0"], "'--budget'"),
        (["--pipeline", "digits-dit", "--where", "modul"], "did you mean 'module'"),
    ],
)
def test_wrong_options_give_one_line(arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(paradec, "load", load)
    result = run(*arguments)
    assert result.exit_code == 2 and word in result.stderr and result.stderr.count("\n") == 1, result.output


def test_help_needs_no_optuna_and_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    assert run("--help").exit_code == 0 and "--study" in run("--help").stdout
    result = run("--limit", "1")
    assert result.exit_code == 2 and "install paradec's extra 'tune'" in result.stderr


@pytest.mark.full
def test_steps_of_a_pipeline_are_searched(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("out", "report", "study")}
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    call = ["tune", "--pipeline", "digits-dit", "--steps", "6", "--budget", "2", "--trials", "3", *options]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0 and "chosen: " in result.stdout, result.stderr
    schedule = paradec.Forecast(when=str(files["out"])).refresh
    assert schedule.total == 6 and len(schedule.steps) == 2
    repeated = CliRunner().invoke(app, [*call, "--json"])
    assert json.loads(repeated.stdout) == json.loads(files["report"].read_text())
