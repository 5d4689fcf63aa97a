"""The command line, on the packaged model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from terminals import Terminal, run
from typer.main import get_command

import paradec
from paradec import cli
from paradec.cli import batches, options, show

PROMPT = "Sort: pear fig apple"


@pytest.fixture(autouse=True)
def no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARADEC_DEBUG", raising=False)


EQUAL = "warning: all answers are equal: temperature 0 takes the likeliest token every time (--temperature 1 draws)\n"


COST = re.compile(r"^\d+ tokens?, .* s(, interrupted.*)?\n", re.MULTILINE)
"""What answers took, on standard error."""


def ok(*arguments: object, stdin: str | bytes | None = None, warning: str = "") -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert COST.sub("", result.stderr) == warning
    return result.stdout


def report(*arguments: object, stdin: str | bytes | None = None, warning: str = "") -> dict[str, Any]:
    return json.loads(ok("generate", *arguments, "--json", stdin=stdin, warning=warning))


def test_generate_prints_the_answer_and_its_cost() -> None:
    result = run("generate", PROMPT)
    cost = result.stderr.removesuffix("\n")
    expected = paradec.generate(paradec.load(), PROMPT)
    assert result.stdout == f"{expected.text}\n"  # in a pipe the answer alone
    forwards = "1 forward" if expected.nfe == 1 else f"{expected.nfe} forwards"
    start = f"{expected.tokens[0]} tokens, {forwards}, {expected.tokens_per_forward:.1f} tokens per forward, "
    assert cost.startswith(start) and cost.endswith(" s")


def test_a_cache_has_its_settings_in_parentheses() -> None:
    counts = {}
    for cache in ("none", "dkv_decode(refresh_interval=1)", "dkv_decode(refresh_interval=8)"):
        flags = ("--max-new-tokens", 8, "--block-length", 8, "--sampler", "low_confidence", "--steps", 8, "--json")
        result = run("generate", PROMPT, *flags, "--cache", cache)  # with advice on standard error
        counts[cache] = json.loads(result.stdout)["forwarded_tokens"]
    plain, always, seldom = counts.values()
    assert always == plain > seldom
    result = run("generate", PROMPT, "--cache", "dkv_decode(refresh=1)")
    assert result.exit_code == 2 and "did you mean 'refresh_interval'" in result.stderr


def test_names_are_separated_by_commas_outside_parentheses() -> None:
    given = ["threshold, credit(threshold=0.5,decay=0.3)", "union(rules=['a','b'],stages=('c','d')),klass"]
    assert options.names(given) == ["threshold", "credit(threshold=0.5,decay=0.3)",
                                    "union(rules=['a','b'],stages=('c','d'))", "klass"]  # fmt: skip
    assert options.names(None) is None


OWN = """
from dataclasses import dataclass
from paradec.caches.prefix import PrefixCache
from paradec.samplers.masked.rules.threshold import Threshold

@dataclass(frozen=True)
class Mine(Threshold):
    name = "mine_of_a_file"

@dataclass(frozen=True)
class Kept(PrefixCache):
    name = "kept_of_a_file"
"""


def test_classes_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, with settings, joined with another sampler, and in a chat; Python takes no files."""
    for registry in (paradec.samplers.registry, paradec.caches.registry):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))
    file = tmp_path / "own.py"
    file.write_text(OWN)
    found = report(PROMPT, "--sampler", f"{file}:Mine(threshold=0.5)", "--cache", f"{file}:Kept", "--block-length", 8)
    assert found["sampler"]["sampler"] == "mine_of_a_file" and found["sampler"]["threshold"] == 0.5
    assert found["cache"] == "kept_of_a_file"
    joined = report(PROMPT, "--sampler", f"credit(threshold=0.8)+{file}:Mine")
    assert [rule["sampler"] for rule in joined["sampler"]["rules"]] == ["credit", "mine_of_a_file"]
    told = ok("chat", stdin=f"/sampler {file}:Mine\n")
    assert told.startswith("mine_of_a_file(threshold=0.9, ")
    with pytest.raises(ValueError, match="unknown sampler"):
        paradec.generate(paradec.load(), PROMPT, sampler=f"{file}:Mine")


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
        "row_nfe": expected.row_nfe[0],
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


def test_suffix_windows(tmp_path: Path) -> None:
    """They reach the request, cost less, and are part of what a comparison was."""
    flags = ("--sampler", "low_confidence", "--block-length", 8)
    for said, seed in (("8", None), ("gaussian:16", 0), ("uniform:16:4", 0)):
        drawn = () if seed is None else ("--seed", seed)
        data = report(PROMPT, *flags, "--suffix", said, *drawn)
        request: dict[str, Any] = {"sampler": "low_confidence", "block_length": 8, "suffix": said, "seed": seed}
        expected = paradec.generate(paradec.load(), PROMPT, **request)
        assert data["text"] == expected.text and data["forwarded_tokens"] == expected.forwarded_tokens
        assert data["forwarded_tokens"] < report(PROMPT, *flags)["forwarded_tokens"]
    out = tmp_path / "results.json"
    one = ("--samplers", "low_confidence", "--tasks", "copy", "--limit", 1, "--block-length", 8, "--json")
    plain, cut = (json.loads(ok("compare", *one, *more)) for more in ((), ("--suffix", "8", "--out", out)))
    assert cut["setup"]["suffix"] == {"window": 8} and "suffix" not in plain["setup"]
    evaluated = [[each["forwarded_tokens"] for each in data["results"]] for data in (plain, cut)]
    assert all(less < more for more, less in zip(*evaluated, strict=True))
    result = run("compare", *one, "--out", out, "--resume")
    assert result.exit_code == 2 and "suffix" in result.stderr


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


def test_a_seed_repeats_a_draw() -> None:
    arguments = ("Shuffle: pear fig apple", "--temperature", 1, "--top-p", 0.9, "--top-k", 20, "--seed", 3)
    assert report(*arguments)["new_tokens"] == report(*arguments)["new_tokens"]


def test_trace_file_replays(tmp_path: Path) -> None:
    from paradec.core.trace import Trace

    file = tmp_path / "steps.json"
    data = report(PROMPT, "--max-new-tokens", 16, "--trace", file)
    trace = Trace.from_json(file)
    assert len(trace.steps) == data["nfe"]
    assert trace.replay()[0][-16:][: len(data["new_tokens"])] == data["new_tokens"]


def test_several_answers_and_several_prompts() -> None:
    prompts = [PROMPT, "Reverse: pear fig apple kiwi"]
    data = report("-", "--lines", "-n", 2, stdin="\n\n".join(prompts) + "\n", warning=EQUAL)
    assert data["text"] == ["apple fig pear"] * 2 + ["kiwi apple fig pear"] * 2
    assert data["tokens"] == [len(ids) for ids in data["new_tokens"]] == [4, 4, 5, 5]
    lines = ok("generate", PROMPT, "-n", 2, warning=EQUAL).splitlines()
    assert lines == ["[1] apple fig pear", "[2] apple fig pear"]


def test_the_summary_of_several_rows_adds_up() -> None:
    """Tokens over forwards, both summed over the rows, as `Output.tokens_per_forward` is."""
    prompts = [PROMPT, "Reverse: pear fig apple kiwi", "Copy: fig"]
    flags = ("--sampler", "low_confidence", "--max-new-tokens", 8, "--block-length", 4)
    request = {"sampler": "low_confidence", "max_new_tokens": 8, "block_length": 4}
    out = paradec.generate(paradec.load(), prompts, **request)
    assert len(set(out.row_nfe)) > 1  # the longest row is not the mean one
    expected = (
        f"{sum(out.tokens)} tokens, {out.nfe} forwards ({sum(out.row_nfe)} row calls), "
        f"{sum(out.tokens) / sum(out.row_nfe):.1f} tokens per row call, "
    )
    done = run("generate", "-", "--lines", *flags, stdin="\n".join(prompts))
    assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1
    assert done.stdout.splitlines() == [f"[{place}] {text}" for place, text in enumerate(out.text, 1)]
    data = report("-", "--lines", *flags, stdin="\n".join(prompts))
    assert data["row_nfe"] == out.row_nfe and data["tokens_per_forward"] == out.tokens_per_forward
    for command in (("generate", PROMPT), ("infill", "fox <mask:3> cow")):
        last = run(*command, "-n", 3, "--temperature", 1, "--seed", 0).stderr
        found = re.match(r"(\d+) tokens, (\d+) forwards? \((\d+) row calls\), ([\d.]+) tokens per row call, ", last)
        tokens, forwards, calls, rate = map(float, found.groups())
        assert calls / 3 <= forwards <= calls - 2 and rate == pytest.approx(tokens / calls, abs=0.05)
    # batch after batch: the calls that were made in each
    lists = report("-", "--lines", *flags, "--batch", 2, stdin="\n".join(prompts))
    assert lists["row_nfe"] == out.row_nfe and lists["nfe"] == max(out.row_nfe[:2]) + out.row_nfe[2]


@pytest.mark.parametrize("command", [("generate", "Shuffle: pear fig apple"), ("infill", "fox <mask:2> cow <mask>")])
def test_batches_are_one_request(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows fit, the answers are those of one batch, and so is what they cost."""
    flags = ("-n", 7, "--temperature", 1, "--seed", 3, "--json")
    whole = json.loads(ok(*command, *flags))
    assert len(set(whole["text"])) > 1
    monkeypatch.setattr(batches, "MOST_ROWS", 3)
    parts = json.loads(ok(*command, *flags))
    assert parts.pop("seconds") > 0 and whole.pop("seconds") > 0
    assert parts.pop("nfe") >= whole.pop("nfe")  # of all batches
    assert parts == whole
    lines = ok(*command, *flags[:-1]).splitlines()
    assert sorted(lines) == [f"[{number}] {text}" for number, text in enumerate(whole["text"], 1)]
    result = run(*command, *flags[:-1], "--trace", "steps.json")
    assert result.exit_code == 2 and "--trace records one batch, which is 3 answers here, not 7" in result.stderr


def test_batches_of_several_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal prompts draw different numbers, whichever batch they stand in."""
    prompts = ["Shuffle: pear fig apple", "Copy: fig", "Shuffle: pear fig apple"]
    flags = ("-", "--lines", "-n", 3, "--temperature", 1.5, "--seed", 1)
    whole = report(*flags, stdin="\n".join(prompts))
    monkeypatch.setattr(batches, "MOST_ROWS", 2)
    assert report(*flags, stdin="\n".join(prompts))["new_tokens"] == whole["new_tokens"]
    out = paradec.generate(paradec.load(), prompts, num_return_sequences=3, temperature=1.5, seed=1)
    assert whole["text"] == out.text


def test_equal_answers_are_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_ROWS", 2)
    ok("generate", PROMPT, "-n", 6, warning=EQUAL)  # once, not for every batch
    ok("generate", PROMPT, "-n", 4, "--temperature", 1e-3, "--seed", 0)  # they may be equal, but were drawn


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    whole = report("Shuffle: pear fig apple", "-n", 6, "--temperature", 1, "--seed", 0)
    generate = paradec.generate

    def small_memory(model: Any, prompts: Any, **request: Any) -> Any:
        rows.append(len(prompts.rows))
        if len(prompts.rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(model, prompts, **request)

    monkeypatch.setattr(paradec, "generate", small_memory)
    assert report("Shuffle: pear fig apple", "-n", 6, "--temperature", 1, "--seed", 0)["text"] == whole["text"]
    assert rows == [6, 3, 1, 1, 1, 1, 1, 1]


def test_rows_that_fit() -> None:
    """Fewer of longer rows, of larger vocabularies and where two branches are evaluated; never none."""
    model = paradec.load()
    assert batches.rows_that_fit(model, 64, 1) == batches.MOST_ROWS
    counts = [batches.rows_that_fit(model, 2**power, 1) for power in range(8, 40)]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1 and len(set(counts)) > 3
    middle = next(power for power, count in enumerate(counts, 8) if 4 <= count < batches.MOST_ROWS)
    guided = batches.rows_that_fit(model, 2**middle, 2)
    assert guided == pytest.approx(batches.rows_that_fit(model, 2**middle, 1) / 2, rel=0.3)


def test_stop_strings() -> None:
    data = report(PROMPT, "--stop", "pear", "--stop", "fig")
    assert (data["text"], data["tokens"], data["finished"]) == ("apple fig", 2, True)


def test_infill() -> None:
    text, question = "kiwi <mask:2> pear", "Reverse: pear fig apple kiwi"
    result = run("infill", text, "--prompt", question)
    answer, cost = result.stdout.removesuffix("\n"), result.stderr
    assert answer == "kiwi apple fig pear"
    assert cost.startswith("2 tokens, ")
    data = json.loads(ok("infill", "-", "--prompt", question, "--json", "--sampler", "low_confidence", stdin=text))
    assert data["fills"] == ["apple fig"] and data["nfe"] == 2 and "new_tokens" not in data
    assert data["text"] == answer
    assert ok("infill", "fox ___ cow", "--mask", "___", "--max-new-tokens", 1).startswith("fox ")
    # without a question the model has nothing to say, but holes are filled, and the text is as long as it was to be
    assert len(ok("infill", "kiwi <mask:2> pear").splitlines()[0].split()) == 4
    assert ok("infill", "kiwi <mask:2> pear", "--no-holes-eos-inf").startswith("kiwi pear\n")
    result = run("infill", "fox cow")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the prompt of row 0 has nothing to fill") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", PROMPT], ["infill", "fox <mask>"]])
def test_live_without_a_terminal_changes_nothing(command: list[str]) -> None:
    plain, live = ok(*command), ok(*command, "--live")
    assert live.splitlines()[0] == plain.splitlines()[0]
    assert live.count("\n") == plain.count("\n") and "\033" not in live


def test_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Draws, wipes its drawing away and prints the answer."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    command = ["generate", PROMPT, "--live", "--sampler", "low_confidence", "--max-new-tokens", "8"]
    assert cli.app(command, standalone_mode=False) == 0
    text = screen.getvalue()
    assert "\N{LIGHT SHADE}" in text and "\033[2K" in text
    assert "apple fig pear" in text.split("\N{LIGHT SHADE}")[-1]
    assert capsys.readouterr().err.startswith("4 tokens, 8 forwards")


@pytest.mark.parametrize("kind", ["samplers", "caches"])
def test_listing(kind: str) -> None:
    registry = getattr(paradec, kind)
    listing, _, pairs = ok(kind).partition("\n\n")
    lines = [line.split("\t") for line in listing.splitlines()]
    assert (kind == "caches") == ("bidirectional" in pairs)
    assert lines[0] == ["name", "family", "settings", "paper", "summary"]
    assert [line[0] for line in lines[1:]] == registry.names()
    entries = json.loads(ok(kind, "--json"))
    assert [entry["name"] for entry in entries] == registry.names()
    assert [entry["settings"].keys() for entry in entries] == [
        registry.get(name).settings().keys() for name in registry.names()
    ]


def commands() -> list[list[str]]:
    group = get_command(cli.app)
    found = [[], *([name] for name in group.commands)]
    return found + [[name, sub] for name, each in group.commands.items() for sub in getattr(each, "commands", {})]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_at_80_columns(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = ok(*command, "--help")
    assert max(map(len, text.splitlines())) <= 80
    listed = text.partition("Commands:")[2]
    assert "..." not in listed and "Commands:" in text or command  # of a command's help, whole sentences


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
        ([PROMPT, "--block-length", "0"], "--block-length"),
        ([PROMPT, "--max-new-tokens", "100000"], "100000"),
        ([""], "empty"),
    ],
)
def test_a_wrong_argument_gives_one_line(arguments: list[str], named: str) -> None:
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert named in result.stderr


HUGE = str(10**30)
REQUESTS = [
    *((name, value) for name in ("--steps", "--block-length", "--top-k", "-n") for value in ("0", HUGE)),
    *(("--temperature", value) for value in ("-1", "nan", "1e400", "1e-9")),
    *(("--top-p", value) for value in ("0", "1.5", "nan")),
    *(("--guidance-scale", value) for value in ("-1", "inf", "1e9")),
    *((name, value) for name in ("--seed", "--max-new-tokens") for value in ("-1", HUGE)),
    *((name, "") for name in ("--cache", "--sampler", "--attention", "--suffix")),
    ("--sampler", "threshold("),
    *(("--set", value) for value in ("=1", "threshold=1e400", "threshold=" + 9999 * "[")),
    *(("--suffix", value) for value in ("x", "-1", "1.5", "64:3", "gaussian", "gaussian:0", "uniform:4:9", HUGE)),
    *(("--trace", value) for value in ("FOLDER", "FILE/steps.json", "caf\udce9.json")),
]
IMAGES = [
    *((name, value) for name in ("--steps", "--num-images", "--height", "--width") for value in ("0", "-1", HUGE)),
    *((name, value) for name in ("--temperature", "--guidance-scale") for value in ("-1", "nan")),
    *(("--top-p", value) for value in ("0", "nan")),
    *(("--class", value) for value in ("", "a", "3-", "5-3", "1,,2", "-1", "0-" + HUGE)),
    *((name, "-1") for name in ("--top-k", "--seed")),
    *(("--cache", value) for value in ("no-such-cache", "dual")),
    *((name, "0") for name in ("--columns", "--enlarge", "--interval")),
    *(("--out", value) for value in ("FOLDER", "sheet.txt", "caf\udce9.png")),
    *(("--model", value) for value in ("FOLDER", "FILE")),
    *(("--trace", "FILE/trace.png"), ("--prompt", "caf\udce9"), ("--sampler", ""), ("--steps", "4")),
]
COMPARE = [
    *((f"--{name}", "0") for name in ("limit", "batch", "max-new-tokens", "block-length")),
    *((f"--{name}", HUGE) for name in ("max-new-tokens", "block-length", "seed")),
    *((name, "no-such") for name in ("--tasks", "--samplers", "--cache", "--suffix", "--prompts")),
    *((name, "FOLDER") for name in ("--prompts", "--out")),
    *(("--seed", "-1"), ("--samplers", ""), ("--prompts", "FILE"), ("--plot", "curve.txt")),
]
TRAIN = [
    *((f"--{name}", "0") for name in ("per-task", "batch", "epochs", "max-new-tokens", "lr", "block-length")),
    *((f"--{name}", "nan") for name in ("lr", "threshold")),
    *(("--per-task", HUGE), ("--threshold", "2"), ("--false-accept-weight", "0"), ("--seed", "-1")),
    *((name, "no-such") for name in ("--kind", "--cache", "--prompts")),
    *(("--prompts", "FILE"), ("--records", "FILE"), ("--out", "FOLDER")),
]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((("generate", PROMPT), option) for option in [*REQUESTS, ("--blocks", ""), ("--stop", "")]),
        *((("infill", "fox <mask>"), option) for option in [*REQUESTS[:6], ("--mask", ""), ("--mask", " ")]),
        *((("image", "--out", "sheet.png"), option) for option in IMAGES),
        *((("compare",), option) for option in COMPARE),
        *((("learn2pd", "train", "--out", "filter.safetensors"), option) for option in TRAIN),
    ],
    ids=lambda entry: " ".join(entry)[:40].encode("ascii", "replace").decode(),
)
def test_nonsense_is_refused_before_a_model_is_loaded(
    command: tuple[str, ...], option: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FILE").write_bytes(b"\xff\x00")
    monkeypatch.chdir(tmp_path)
    loads = []
    monkeypatch.setattr(paradec, "load", lambda *_, **__: loads.append(1))
    if option[0] in command:
        command = tuple(entry for entry in command if entry not in ("--out", "sheet.png", "filter.safetensors"))
    if command[0] == "image" and option[0] not in ("--class", "--prompt"):
        command = (*command, "--class", "3")
    result = run(*command, *option)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not loads or option == ("--model", "FILE")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "FOLDER"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_files_that_may_not_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "steps.json"
    closed.write_text("kept")
    closed.chmod(0o400)
    result = run("generate", PROMPT, "--trace", closed)
    assert result.exit_code == 2 and "permission denied" in result.stderr and closed.read_text() == "kept"


def test_unknown_command_gives_one_line() -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_the_end_of_the_last_line_is_no_part_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(name: str, prompt: Any, **_: Any) -> None:
        asked.append(prompt)

    monkeypatch.setattr(sys.modules["paradec.cli.generate"], "decode", note)
    for given in ("fox\ncow", "fox\ncow\n", "fox\r\ncow\r\n", b"\xef\xbb\xbffox\ncow\n"):
        assert run("generate", "-", stdin=given).exit_code == run("infill", "-", stdin=given).exit_code == 0
    assert asked == ["fox\ncow"] * 8
    assert run("generate", "-", stdin=" caf\u00e9 \n").exit_code == 0 and asked[-1] == " caf\u00e9 "
    run("generate", "fox\n")
    assert asked[-1] == "fox\n"  # an argument is taken as it is


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("caf\u00e9".encode("latin-1"), "standard input is not UTF-8 text: unexpected end of data at byte 3"),
        (b"Sort: \xe4pfel\n", "standard input is not UTF-8 text: invalid continuation byte at byte 6"),
        (b"\x7fELF\x02\x01\x01\x00", "standard input is no text: it has a zero byte at position 7"),
        (b"\x89PNG\r\n\x1a\n\x00", "standard input is not UTF-8 text: invalid start byte at byte 0"),
        ("Sort: fig".encode("utf-16"), "standard input is not UTF-8 text: invalid start byte at byte 0"),
    ],
)
def test_binary_standard_input_gives_one_line(data: bytes, message: str) -> None:
    for command in ("generate", "infill"):
        result = run(command, "-", stdin=data)
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


def test_arguments_that_are_no_text_give_one_line() -> None:
    odd = "caf\udce9"  # what Python makes of bytes that are no UTF-8
    for arguments in (["generate", odd], ["generate", PROMPT, "--stop", odd], ["infill", f"{odd} <mask>"],
                      ["infill", "<mask>", "--prompt", odd], ["infill", "<mask>", "--mask", odd]):  # fmt: skip
        result = run(*arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), arguments
        assert "is not UTF-8 text" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["generate", PROMPT, "--sampler", "no-such"], ["generate", PROMPT, "--no-such-option"], ["no"]]
)
def test_debugging_shows_the_traceback_and_keeps_the_exit_code(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(*arguments)
    monkeypatch.setenv("PARADEC_DEBUG", "1")
    result = run(*arguments)
    assert result.exit_code == plain.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr and "Traceback" not in plain.stderr
    assert result.stderr.endswith(plain.stderr)


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

    monkeypatch.setattr(show.Bar, "update", update)
    result = run("generate", PROMPT, "--sampler", "low_confidence", "--max-new-tokens", 8, "--json")
    assert result.exit_code == 130
    data = json.loads(result.stdout)
    assert data["interrupted"] and data["nfe"] == 2


def test_interrupt_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paradec, "load", interrupted)
    result = run("generate", PROMPT)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_an_interrupt_among_batches_prints_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches, and of the one that was interrupted the rows that had ended."""
    prompts = [PROMPT, "Sort: fig apple", "Reverse: pear fig apple kiwi", "Sort: plum fig apple kiwi"] * 2
    flags = ("generate", "-", "--lines", "--sampler", "low_confidence", "--max-new-tokens", 12, "--block-length", 4)
    whole = sorted(ok(*flags, stdin="\n".join(prompts)).splitlines())
    monkeypatch.setattr(batches, "MOST_ROWS", 3)
    update, over = show.Bar.update, []

    def interrupt(bar: Any, state: Any, commit: Any) -> None:
        update(bar, state, commit)
        over.append(int((~state.running).sum()))
        if 3 in over and 0 < over[-1] < 3:  # in the second batch
            raise KeyboardInterrupt

    monkeypatch.setattr(show.Bar, "update", interrupt)
    result = run(*flags, stdin="\n".join(prompts))
    assert result.exit_code == 130 and "Traceback" not in result.stderr
    lines, summary = result.stdout.splitlines(), result.stderr.splitlines()[-1]
    assert sorted(lines[:3]) == sorted(whole[:3]) and len(lines) == 3 + over[-1]
    assert {line.partition(" ")[2] for line in lines[3:]} < {line.partition(" ")[2] for line in whole[3:6]}
    assert summary.endswith(f"s, interrupted after {len(lines)} of 8 answers")


def test_a_full_answer_is_complete_without_an_end_token() -> None:
    model = paradec.load()
    mask = model.facts.mask_token_id
    out = paradec.generate(
        model,
        input_ids=[[5, mask, 6, 7, 8], [5, mask, mask, mask, 8]],
        sampler="low_confidence",
        callback=lambda state, commit: True,  # after one token of each
    )
    assert out.finished == [False, False] and out.tokens == [1, 1]
    assert batches.completed(out) == [0]


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
    monkeypatch.setattr(show.Bar, "delay", delay)
    monkeypatch.setattr(show.Bar, "interval", 0.0)
    with show.Bar() as bar:
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
    read = options.settings([f"some-name={text}"])
    assert read == {"some_name": value} and type(read["some_name"]) is type(value)


def test_programs_keep_their_own_handling_of_interrupts() -> None:
    # ignored, where the tests themselves were started in the background of a shell
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)


def heed_interrupts() -> None:
    """Run in a child before its program: shells start what runs in their background with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize(
    ("as_module", "debug", "imported"), [(False, "0", "torch.nn"), (True, "1", "transformers.utils.import_utils")]
)
def test_an_interrupt_while_it_starts(as_module: bool, debug: str, imported: str, tmp_path: Path) -> None:
    """While torch is imported, which is before any line of the command itself has run, and while the model loads."""
    script = tmp_path / "paradec"
    script.write_text("import sys\nfrom paradec.cli import app\nsys.exit(app())\n")
    start = ["-m", "paradec"] if as_module else [str(script)]
    command = [sys.executable, "-X", "importtime", *start, "generate", PROMPT]
    there = os.environ | {"PARADEC_DEBUG": debug, "PYTHONPATH": str(Path(paradec.__file__).parent.parent)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=there, preexec_fn=heed_interrupts
    )
    for line in process.stderr:  # a line per module, when it has been imported
        if imported in line:
            process.send_signal(signal.SIGINT)
            break
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr and ("File " in stderr) == (debug == "1")


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_an_interrupt_while_many_answers_are_decoded() -> None:
    """They are printed as they come, long before the last one."""
    command = [sys.executable, "-m", "paradec", "generate", "Shuffle: pear fig apple", "-n", "100000"]
    there = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).parent.parent)}
    process = subprocess.Popen(
        [*command, "--temperature", "1", "--max-new-tokens", "4"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=there, preexec_fn=heed_interrupts,
    )  # fmt: skip
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    lines = [first, *process.stdout.read().splitlines()]
    assert process.wait() == 130
    assert sorted(int(line[1 : line.index("]")]) for line in lines) == list(range(1, len(lines) + 1))
    assert process.stderr.read().endswith(f", interrupted after {len(lines)} of 100000 answers\n")


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "paradec", "samplers"]
    there = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).parent.parent)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=there)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


def test_module_runs_as_a_command() -> None:
    """The real process: exit codes, streams, and no terminal."""
    command = [sys.executable, "-m", "paradec"]
    done = subprocess.run([*command, "samplers"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "threshold" in done.stdout
    done = subprocess.run([*command, "generate"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_preset_is_a_request_that_python_saved(tmp_path: Path) -> None:
    """Its values stand in the place of the options' defaults; what is given on the command line wins."""
    path = tmp_path / "mine.json"
    sampler = paradec.samplers.create("threshold", threshold=0.5)
    request = paradec.Request(sampler=sampler, cache="dual", max_new_tokens=8, temperature=1.0, seed=3, top_k=9)
    request.save(path)
    model = paradec.load()
    given: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["--seed", "4", "--temperature", "0.5"], {"seed": 4, "temperature": 0.5}),
        (["--max-new-tokens", "2"], {"max_new_tokens": 2}),
    ]
    for more, changes in given:
        found = report(PROMPT, "--preset", path, *more)
        assert len(found["new_tokens"]) <= changes.get("max_new_tokens", 8)
        wanted = paradec.generate(model, PROMPT, preset=path, **changes)
        assert found["text"] == wanted.text and found["cache"] == "dual"
        assert found["new_tokens"] == wanted.new_tokens[0, : wanted.tokens[0]].tolist()
    done = run("generate", PROMPT, "--preset", path, "--set", "threshold=0.9")
    assert done.exit_code != 0 and "give --sampler" in done.stderr
    path.write_text('{"temprature": 1}')
    done = run("infill", "a <mask>", "--preset", path)
    assert done.exit_code != 0 and "did you mean 'temperature'" in done.stderr


def test_canvases_are_decoded_by_their_own_sampler(tmp_path: Path) -> None:
    """No --sampler is the model's; a masked one says what is kept; encoder calls are counted."""
    from byte_tokenizers import byte_level_tokenizer
    from canvases import tiny_module

    tokenizer = byte_level_tokenizer()
    tiny_module(vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = ["one two", "--model", str(tmp_path), "--seed", "1", "--max-new-tokens", "20", "--json"]
    own = json.loads(run("generate", *given).stdout)
    assert own["sampler"]["sampler"] == "diffusion_gemma" and own["cache"] == "canvas"
    assert own["nfe"] > own["encoder_calls"] == 2
    other = json.loads(run("generate", *given, "--sampler", "entropy_threshold").stdout)
    assert other["sampler"]["rule"]["sampler"] == "entropy_threshold"
    default = json.loads(run("generate", *given, "--sampler", "threshold").stdout)  # said, though it is the default
    assert default["sampler"]["rule"]["sampler"] == "threshold"
    refused = run("generate", *given, "--temperature", "0.5")
    assert refused.exit_code == 2 and "t_max and t_min are settings of the sampler" in refused.stderr
