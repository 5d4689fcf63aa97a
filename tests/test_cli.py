"""The command line, on the packaged model."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import paradec
from paradec import cli

PROMPT = "Sort: pear fig apple"


@pytest.fixture(autouse=True)
def no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARADEC_DEBUG", raising=False)


def run(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def ok(*arguments: object, stdin: str | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def report(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
    return json.loads(ok("generate", *arguments, "--json", stdin=stdin))


def test_generate_prints_the_answer_and_its_cost() -> None:
    answer, cost = ok("generate", PROMPT).splitlines()
    expected = paradec.generate(paradec.load(), PROMPT)
    assert answer == expected.text
    forwards = "1 forward" if expected.nfe == 1 else f"{expected.nfe} forwards"
    start = f"{expected.tokens[0]} tokens, {forwards}, {expected.tokens_per_forward:.1f} tokens per forward, "
    assert cost.startswith(start) and cost.endswith(" s")


def test_json_holds_what_the_output_holds() -> None:
    data = report(PROMPT, "--sampler", "low_confidence", "--steps", 8, "--max-new-tokens", 8, "--block-length", 8)
    expected = paradec.generate(
        paradec.load(), PROMPT, sampler="low_confidence", steps=8, max_new_tokens=8, block_length=8
    )
    new_tokens = expected.new_tokens[0].tolist()
    assert data.pop("seconds") > 0
    assert data == {
        "text": expected.text,
        "new_tokens": new_tokens[: expected.tokens[0]] if expected.finished[0] else new_tokens,
        "tokens": expected.tokens[0],
        "finished": expected.finished[0],
        "nfe": expected.nfe,
        "row_forwards": expected.row_forwards,
        "forwarded_tokens": expected.forwarded_tokens,
        "tokens_per_forward": expected.tokens_per_forward,
        "sampler": paradec.samplers.create("low_confidence").to_dict(),
        "cache": "none",
        "interrupted": False,
    }


SPARSE = ("--attention", "sparsed", "--attention-set", "select=0.2", "--attention-set", "block-size=4")


def test_attention_and_its_settings() -> None:
    request = {"sampler": "low_confidence", "max_new_tokens": 8, "block_length": 8}
    flags = ("--sampler", "low_confidence", "--max-new-tokens", 8)
    data = report(PROMPT, *flags, "--block-length", 8, *SPARSE, "--attention-set", "dense-steps=1")
    chosen = paradec.SparseD(select=0.2, block_size=4, dense_steps=1)
    expected = paradec.generate(paradec.load(), PROMPT, attention=chosen, **request)
    assert data["text"] == expected.text and data["nfe"] == expected.nfe
    assert data["attention"] == dataclasses.asdict(expected.attention)
    assert data["attention"]["sparse_calls"][0] > 0 and data["attention"]["density"][0] < 1
    assert "attention" not in report(PROMPT, *flags, "--attention", "dense")
    short = report(PROMPT, *flags, "--attention", "sparsed", "--attention-set", "preset=short")
    assert short["attention"]["attention"] == "sparsed"
    filled = json.loads(ok("infill", "Sort : <mask> fig", "--json", *SPARSE))
    assert filled["attention"]["pattern_calls"] is not None


def test_compare_takes_an_attention(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    flags = ("--samplers", "threshold", "--tasks", "copy", "--limit", 1, "--max-new-tokens", 8, "--json")
    data = json.loads(ok("compare", *flags, *SPARSE, "--out", out))
    assert data["setup"]["attention"] == paradec.SparseD(select=0.2, block_size=4).to_dict()
    result = run("compare", *flags, "--out", out, "--resume")
    assert result.exit_code == 2 and "attention" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--attention", "sparse"), "unknown attention: 'sparse' (did you mean 'sparsed'?)"),
        (("--attention-set", "select=0.3"), "give --attention sparsed"),
        (("--attention", "dense", "--attention-set", "select=0.3"), "give --attention sparsed"),
        (("--attention", "sparsed", "--attention-set", "select"), "--attention-set takes NAME=VALUE, got 'select'"),
        (("--attention", "sparsed", "--attention-set", "select=2"), "select=2 must be a number in (0, 1]"),
        (("--attention", "sparsed", "--attention-set", "blocks=2"), "blocks"),
    ],
)
def test_bad_attention_is_one_line(flags: tuple[str, ...], message: str) -> None:
    for command in (("generate", PROMPT), ("compare",)):
        result = run(*command, *flags)
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_prompt_from_standard_input() -> None:
    assert report("-", stdin=PROMPT + "\n")["text"] == report(PROMPT)["text"]


@pytest.mark.parametrize(
    ("text", "prompt"),
    [("a\n", "a"), ("a\r\n", "a"), ("a", "a"), ("a\nb\n", "a\nb"), ("  a \n", "  a "), ("\n\ta\n", "\n\ta")],
)
def test_the_final_newline_is_not_the_prompt_s(text: str, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs end their last line; all other white space is the user's."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text, newline=""))
    assert cli._text("-") == prompt and cli._text(text) == text


def test_what_the_model_reads_of_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    for text, ends in (("Sort: pear\n", 0), ("Sort:\npear\r\n", 1)):
        ok("generate", "-", "--raw", "--trace", file, "--max-new-tokens", 4, stdin=text)
        canvas = json.loads(file.read_text())["canvas"][0]
        newline = paradec.load().tokenizer("\n")["input_ids"][0]
        assert len(canvas) == 7 + ends and canvas.count(newline) == ends


def test_settings_reach_the_sampler() -> None:
    data = report(PROMPT, "--set", "threshold=0.5")
    assert data["sampler"] == paradec.samplers.create("threshold", threshold=0.5).to_dict()
    assert data["nfe"] <= report(PROMPT, "--set", "threshold=1.0")["nfe"]


def test_a_seed_repeats_a_draw() -> None:
    arguments = ("Shuffle: pear fig apple", "--temperature", 1, "--top-p", 0.9, "--top-k", 20, "--seed", 3)
    assert report(*arguments)["new_tokens"] == report(*arguments)["new_tokens"]


def test_trace_file_replays(tmp_path: Path) -> None:
    from paradec.trace import Trace

    file = tmp_path / "steps.json"
    data = report(PROMPT, "--max-new-tokens", 16, "--trace", file)
    trace = Trace.from_json(file)
    assert len(trace.steps) == data["nfe"]
    assert trace.replay()[0][-16:][: len(data["new_tokens"])] == data["new_tokens"]


def test_raw_skips_the_chat_template() -> None:
    assert report(PROMPT, "--raw")["tokens"] == paradec.generate(paradec.load(), PROMPT, chat=False).tokens[0]


def test_several_answers_and_several_prompts() -> None:
    prompts = [PROMPT, "Reverse: pear fig apple kiwi"]
    data = report("-", "--lines", "-n", 2, stdin="\n\n".join(prompts) + "\n")
    assert data["text"] == ["apple fig pear"] * 2 + ["kiwi apple fig pear"] * 2
    assert data["tokens"] == [len(ids) for ids in data["new_tokens"]] == [4, 4, 5, 5]
    lines = ok("generate", PROMPT, "-n", 2).splitlines()
    assert lines[:2] == ["[1] apple fig pear", "[2] apple fig pear"] and lines[2].startswith("8 tokens, ")


def test_stop_strings() -> None:
    data = report(PROMPT, "--stop", "pear", "--stop", "fig")
    assert (data["text"], data["tokens"], data["finished"]) == ("apple fig", 2, True)


def test_infill() -> None:
    text, question = "kiwi <mask:2> pear", "Reverse: pear fig apple kiwi"
    answer, cost = ok("infill", text, "--prompt", question).splitlines()
    assert answer == "kiwi apple fig pear"
    assert cost.startswith("2 tokens, ")
    data = json.loads(ok("infill", "-", "--prompt", question, "--json", "--sampler", "low_confidence", stdin=text))
    assert data["fills"] == ["apple fig"] and data["nfe"] == 2 and "new_tokens" not in data
    assert data["text"] == answer
    assert ok("infill", "fox ___ cow", "--mask", "___", "--max-new-tokens", 1).startswith("fox ")
    result = run("infill", "fox cow")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the prompt of row 0 has nothing to fill") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", PROMPT], ["infill", "fox <mask>"]])
def test_live_without_a_terminal_changes_nothing(command: list[str]) -> None:
    plain, live = ok(*command), ok(*command, "--live")
    assert live.splitlines()[0] == plain.splitlines()[0]
    assert live.count("\n") == plain.count("\n") and "\033" not in live


def test_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, wipes its drawing away and prints the answer."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    command = ["generate", PROMPT, "--live", "--sampler", "low_confidence", "--max-new-tokens", "8"]
    assert cli.app(command, standalone_mode=False) == 0
    text = screen.getvalue()
    assert "\N{LIGHT SHADE}" in text and "\033[2K" in text
    assert "apple fig pear" in text.split("\N{LIGHT SHADE}")[-1]
    assert text.splitlines()[-1].startswith("4 tokens, 8 forwards")


@pytest.mark.parametrize("kind", ["samplers", "caches"])
def test_listing(kind: str) -> None:
    registry = getattr(paradec, kind)
    listing, _, pairs = ok(kind).partition("\n\n")
    lines = [line.split("\t") for line in listing.splitlines()]
    assert (kind == "caches") == ("bidirectional" in pairs)
    assert lines[0] == ["name", "family", "settings", "paper"]
    assert [line[0] for line in lines[1:]] == registry.names()
    entries = json.loads(ok(kind, "--json"))
    assert [entry["name"] for entry in entries] == registry.names()
    assert [entry["settings"].keys() for entry in entries] == [
        registry.get(name).settings().keys() for name in registry.names()
    ]


def test_listing_shows_settings_and_papers() -> None:
    (line,) = [line for line in ok("samplers").splitlines() if line.startswith("threshold\t")]
    assert "threshold=0.9" in line and "2505.22618" in line


def test_version_and_help() -> None:
    assert ok("--version") == f"paradec {paradec.__version__}\n"
    assert "generate" in ok() and ok() == ok("--help")
    assert "--sampler" in ok("generate", "-h")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "Missing argument"),
        ([PROMPT, "more"], "more"),
        ([PROMPT, "--no-such-option"], "--no-such-option"),
        ([PROMPT, "--steps", "many"], "--steps"),
        ([PROMPT, "--sampler", "treshold"], "did you mean 'threshold'"),
        ([PROMPT, "--set", "treshold=0.5"], "did you mean 'threshold'"),
        ([PROMPT, "--set", "threshold"], "NAME=VALUE"),
        ([PROMPT, "--set", "threshold=1", "--set", "threshold=0"], "twice"),
        ([PROMPT, "--set", "threshold=high"], "'high'"),
        ([PROMPT, "--set", "threshold=-1"], "-1"),
        ([PROMPT, "--cache", "no-such-cache"], "no-such-cache"),
        ([PROMPT, "--model", "./no/such/folder"], "./no/such/folder"),
        ([PROMPT, "--dtype", "int8"], "int8"),
        ([PROMPT, "--device", "no-such-device"], "no-such-device"),
        ([PROMPT, "--temperature", "-1"], "temperature"),
        ([PROMPT, "--top-p", "2"], "top_p"),
        ([PROMPT, "--top-k", "0"], "top_k"),
        ([PROMPT, "--sampler", "random", "--steps", "0"], "steps"),
        ([PROMPT, "--block-length", "0"], "block_length"),
        ([PROMPT, "--max-new-tokens", "0"], "max_new_tokens"),
        ([PROMPT, "--max-new-tokens", "100000"], "100000"),
        ([PROMPT, "--guidance-scale", "nan"], "guidance_scale"),
        ([""], "empty"),
        ([PROMPT, "--trace", "no/such/folder/steps.json"], "steps.json"),
    ],
)
def test_a_wrong_argument_gives_one_line(arguments: list[str], named: str) -> None:
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert named in result.stderr


def test_unknown_command_gives_one_line() -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_empty_standard_input_gives_one_line() -> None:
    result = run("generate", "-", stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "empty" in result.stderr


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARADEC_DEBUG", "1")
    result = run("generate", PROMPT, "--sampler", "no-such-sampler")
    assert isinstance(result.exception, ValueError)


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(paradec, "generate", broken)
    assert isinstance(run("generate", PROMPT).exception, ZeroDivisionError)


def test_interrupt_prints_what_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def update(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli._Bar, "update", update)
    result = run("generate", PROMPT, "--sampler", "low_confidence", "--max-new-tokens", 8, "--json")
    assert result.exit_code == 130
    data = json.loads(result.stdout)
    assert data["interrupted"] and data["nfe"] == 2


def test_interrupt_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paradec, "load", interrupted)
    result = run("generate", PROMPT)
    assert (result.exit_code, result.stdout) == (130, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "delay", "shown"),
    [
        (Terminal, "xterm", 0.0, True),
        (Terminal, "xterm", 60.0, False),
        (Terminal, "dumb", 0.0, False),
        (io.StringIO, "xterm", 0.0, False),
    ],
)
def test_progress_bar(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], term: str, delay: float, shown: bool
) -> None:
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(cli._Bar, "delay", delay)
    monkeypatch.setattr(cli._Bar, "interval", 0.0)
    with cli._Bar() as bar:
        for decided in range(3):
            bar.update(SimpleNamespace(progress=(decided, 3)), None)
    assert ("decoding" in screen.getvalue()) == shown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.8", 0.8),
        ("3", 3),
        ("true", True),
        ("True", True),
        ("null", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("'0.8'", "0.8"),
        ("dual", "dual"),
        ("", ""),
    ],
)
def test_values_of_settings(text: str, value: object) -> None:
    read = cli._settings([f"some-name={text}"])
    assert read == {"some_name": value} and type(read["some_name"]) is type(value)


def test_module_runs_as_a_command() -> None:
    """The real process: exit codes, streams, and no terminal."""
    command = [sys.executable, "-m", "paradec"]
    done = subprocess.run([*command, "samplers"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "threshold" in done.stdout
    done = subprocess.run([*command, "generate"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
