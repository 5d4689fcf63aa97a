"""`paradec tune`: what it prints and writes, and what it says of options that are wrong."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paradec
from paradec.cli import app

SHORT = ["--samplers", "threshold,factor", "--trials", "1", "--blocks", "own", "--max-new-tokens", "16"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_a_preset_from_a_file_of_prompts(tmp_path: Path) -> None:
    prompts, preset, report = (tmp_path / name for name in ("own.jsonl", "preset.json", "report.json"))
    words = ("pear", "fig", "apple", "kiwi")
    lines = [{"prompt": f"Reverse: {a} {b}", "answer": f"{b} {a}"} for a in words for b in words if a != b]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = run("--prompts", prompts, "--out", preset, "--report", report, *SHORT)
    assert done.exit_code == 0, done.output
    assert "6 prompts chose, by answers; 6 others are reported" in done.stdout
    assert "Only 6 prompts chose" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    found = json.loads(report.read_text())
    assert found["complete"] and found["trials"]["failed"] == 0
    chosen = next(point for point in found["points"] if point["chosen"])
    assert json.loads(preset.read_text()) == chosen["preset"] and f"preset {str(preset)!r}" in done.stderr
    again = CliRunner().invoke(app, ["generate", "Reverse: pear fig", "--preset", str(preset), "--json"])
    told = json.loads(again.stdout)
    out = paradec.generate(paradec.load(), "Reverse: pear fig", preset=preset)
    assert told["text"] == out.text and told["nfe"] == out.nfe


def test_a_checker_of_a_file_and_json(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(prompt, answer):\n    return 1 / (1 + len(answer))\n")
    done = run("--limit", "1", "--checker", f"{tmp_path / 'mine.py'}:short", "--json", *SHORT)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["setup"]["checker"] == "short"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--blocks", "x"], "--blocks 'x'"),
        (["--checker", "nothing"], "must be FILE.py:NAME"),
        (["--checker", "nothing.py:f"], "is no file"),
        (["--checker", "json:nothing"], "has no function or class 'nothing'"),
        (["--study", "/nowhere/x.db"], "cannot write --study"),
        (["--out", "/nowhere/x.json"], "cannot write --out"),
        (["--point", "0"], "'--point'"),
        (["--budget", "3"], "--budget needs --pipeline"),
        (["--pipeline", "digits-dit", "--mask", "x"], "--mask is not for --pipeline"),
        (["--pipeline", "digits-ar"], "is no diffusers pipeline"),
        (["--pipeline", "digits-dit", "--budget", "0"], "'--budget'"),
        (["--pipeline", "digits-dit", "--where", "modul"], "did you mean 'module'"),
    ],
)
def test_wrong_options_give_one_line(arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(paradec, "load", load)
    done = run(*arguments)
    assert done.exit_code == 2 and word in done.stderr and done.stderr.count("\n") == 1, done.output


def test_help_needs_no_optuna_and_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else own(name))
    assert run("--help").exit_code == 0 and "--study" in run("--help").stdout
    done = run("--limit", "1")
    assert done.exit_code == 2 and "install paradec's extra 'tune'" in done.stderr


@pytest.mark.full
def test_steps_of_a_pipeline(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("out", "report", "study")}
    named = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    call = ["tune", "--pipeline", "digits-dit", "--steps", "6", "--budget", "2", "--trials", "3", *named]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0 and "chosen: " in done.stdout, done.stderr
    schedule = paradec.Forecast(when=str(files["out"])).refresh
    assert schedule.total == 6 and len(schedule.steps) == 2
    again = CliRunner().invoke(app, [*call, "--json"])
    assert json.loads(again.stdout) == json.loads(files["report"].read_text())
