"""`paradec trace`, and the file types of `--trace` in other commands."""

import json
from pathlib import Path

import pytest
from commands import run
from PIL import Image

import paradec
from paradec.core.trace import Trace
from paradec.tools.traces.files import page

PROMPT = "Sort: wolf fig otter zebra deer orange"


def ok(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    files = [folder / "one.json", folder / "several.json"]
    for file, sampler in zip(files, ("low_confidence", "threshold"), strict=True):
        ok("generate", PROMPT, "--sampler", sampler, "--max-new-tokens", 8, "--trace", file)
    return files


@pytest.mark.thinned
@pytest.mark.parametrize("suffix", ["html", "gif", "json", "PNG", ""])
def test_the_suffix_selects_the_file_type(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"run.{suffix}".rstrip(".")
    ok("generate", PROMPT, "--max-new-tokens", 8, "--trace", file)
    start = {"html": b"<!DOCTYPE html>", "gif": b"GIF89a", "PNG": b"\x89PNG"}.get(suffix, b'{"canvas"')
    assert file.read_bytes().startswith(start)


def test_unknown_suffixes_are_refused_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paradec, "load", lambda *_, **__: pytest.fail("loaded"), raising=False)
    file = tmp_path / "run.hmtl"
    for command in (["generate", PROMPT], ["infill", "sort <mask>"]):
        result = run(*command, "--trace", file)
        assert result.exit_code == 2 and "--trace" in result.stderr and ".html (a page)" in result.stderr
    result = run("image", "--out", tmp_path / "x.png", "--class", "3", "--trace", file)
    assert result.exit_code == 2 and ".html" in result.stderr and list(tmp_path.iterdir()) == []


def test_two_runs_are_shown_together(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    lines = ok("trace", *runs, "--out", out, "--title", "a < b").splitlines()
    first, second = (Trace.load(file) for file in runs)
    assert lines[0].startswith("one: low_confidence, rows 1, steps 8, forwards 8, tokens final 8, positions evaluated ")
    assert lines[1].startswith(f"several: threshold, rows 1, steps {len(second.steps)}, ")
    assert lines[2].endswith("both.html")
    text = out.read_text(encoding="utf-8")
    assert text == page([first, second], ["one", "several"], "a < b")
    assert "<title>a &lt; b</title>" in text
    ok("trace", *runs, "--out", tmp_path / "both.gif", "--name", "a", "--name", "b")
    assert Image.open(tmp_path / "both.gif").n_frames == 9
    data = json.loads(ok("trace", runs[1], runs[1], "--json"))
    assert data["out"] is None and [entry["name"] for entry in data["runs"]] == ["several (1)", "several (2)"]
    assert data["runs"][0]["forwards"] == len(second.steps) < 8 and data["runs"][0]["final"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ONE", "--out", "no/such/x.html"], "cannot write --out"),
        (["ONE", "--out", "ONE"], "one of the files to read"),
        (["ONE", "ONE", "--out", "DIR/both.json"], "holds one run"),
        (["ONE", "--name", "a", "--name", "b"], "--name is given 2 times for 1 files"),
        (["BAD"], "not a trace that paradec wrote"),
        (["ONE"] * 5, "5 traces: from 1 to 4"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, runs: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"steps": 3}')
    paths = {"ONE": str(runs[0]), "BAD": str(bad), "DIR/both.json": str(tmp_path / "both.json")}
    before = runs[0].read_bytes()
    result = run("trace", *(paths.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.startswith("error: ")
    assert runs[0].read_bytes() == before


@pytest.mark.thinned
@pytest.mark.parametrize("model", ["digits-ar", "digits-maskgit", "digits-dit"])
def test_traces_of_image_models(model: str, tmp_path: Path) -> None:
    file, data = tmp_path / "run.html", tmp_path / "run.json"
    arguments = ["image", "--model", model, "--class", "3", "--seed", "1", "--enlarge", 1, "--out", tmp_path / "x.png"]
    arguments += [] if model == "digits-ar" else ["--steps", "6"]
    ok(*arguments, "--trace", file)
    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    ok(*arguments, "--trace", data)
    trace = Trace.load(data)
    assert trace.images is not None and len(trace.images) == 1
    if model == "digits-dit":
        assert len(trace.steps) == 6 and {step.kind for step in trace.steps} == {"full", "forecast"}
        assert trace.unit == "modules" and trace.row_nfe[0] == sum(step.kind == "full" for step in trace.steps)
    else:
        assert trace.grid == (7, 7) and sum(len(step.commits) for step in trace.steps) == 49
    assert Image.open(tmp_path / "x.png").size == (28, 28)
