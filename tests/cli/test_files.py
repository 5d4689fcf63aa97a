"""`paradec generate --in FILE --out FILE`: a line for every prompt, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from terminals import ok, refused, run

import paradec
from paradec.cli import batches

CHAT = [{"role": "user", "content": "Reverse: pear fig apple"}]
GOOD = ["Sort: pear fig apple", CHAT, "Copy: fig fox cow", "Shuffle: lion mole cow", "Sort: pear fig apple"]


def prompts(folder: Path, entries: list[Any], name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(entry if isinstance(entry, bytes) else json.dumps(entry) for entry in entries) + "\n")
    return file


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def given(*texts: Any) -> list[Any]:
    return [{"messages": text} if isinstance(text, list) else {"prompt": text} for text in texts]


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_every_prompt_is_answered_in_its_place(batch: int, tmp_path: Path) -> None:
    source, out = prompts(tmp_path, given(*GOOD)), tmp_path / "answers.jsonl"
    printed = ok("generate", "--in", source, "--out", out, "--batch", batch, "--seed", 0, "--temperature", 1)
    found = lines(out)
    model = paradec.load()
    chats = [text if isinstance(text, list) else [{"role": "user", "content": text}] for text in GOOD]
    expected = paradec.generate(model, chats, seed=0, temperature=1.0)
    assert [entry["text"] for entry in found] == expected.text
    assert [entry["nfe"] for entry in found] == expected.row_nfe
    assert [entry["tokens"] for entry in found] == expected.tokens
    assert [entry["prompt"] for entry in found] == GOOD and [entry["line"] for entry in found] == [1, 2, 3, 4, 5]
    summary, cost = printed.splitlines()
    assert summary == f"5 answers in {out}"
    assert cost.startswith(f"{sum(expected.tokens)} tokens, {sum(expected.row_nfe)} forwards (longest row ")


def test_a_prompt_that_fails_has_its_error_and_holds_up_no_other(tmp_path: Path) -> None:
    entries = [
        {"prompt": GOOD[0], "id": "a"},
        {"prompt": "Hello"},
        {"prompt": 3, "id": 7},
        {"prompt": ""},
        [1, 2],
        "Copy: fig fox cow",
        {"messages": [{"role": "user"}]},
        {"prompt": "Copy: " + "fig " * 600},
    ]
    source, out = prompts(tmp_path, entries), tmp_path / "answers.jsonl"
    with source.open("a") as file:
        file.write("\n{no json\n")
    result = run("generate", "--in", source, "--out", out)
    assert result.exit_code == 1 and "2 answers in" in result.stdout and "7 failed" in result.stdout
    found = lines(out)
    assert [entry["line"] for entry in found] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert found[0]["id"] == "a" and found[2]["id"] == 7 and "id" not in found[1]
    assert [entry.get("text") for entry in found] == ["apple fig pear", *[None] * 4, "fig fox cow", *[None] * 3]
    errors = [entry.get("error", "") for entry in found]
    assert "outside the model's vocabulary: 'Hello'" in errors[1] and "must be a text" in errors[2]
    assert "empty" in errors[3] and "neither a text nor an object" in errors[4] and "role" in errors[6]
    assert "512" in errors[7] and "no JSON" in errors[8]
    data = json.loads(run("generate", "--in", source, "--out", tmp_path / "b.jsonl", "--json").stdout)
    assert (data["prompts"], data["answered"], data["failed"], data["tokens"]) == (9, 2, 7, 8)


def test_plain_lines_and_several_answers(tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("Shuffle: pear fig apple\r\n\nCopy: fig fox cow\n")
    ok("generate", "--in", source, "--out", out, "-n", 3, "--temperature", 1, "--seed", 5, "--batch", 2)
    model = paradec.load()
    texts = ["Shuffle: pear fig apple", "Copy: fig fox cow"]
    expected = paradec.generate(model, texts, num_return_sequences=3, temperature=1.0, seed=5)
    found = lines(out)
    assert [entry["line"] for entry in found] == [1, 3]
    assert [text for entry in found for text in entry["text"]] == expected.text
    assert [nfe for entry in found for nfe in entry["nfe"]] == expected.row_nfe


def test_a_run_that_goes_on_is_a_whole_one(tmp_path: Path) -> None:
    """What was answered stays, what failed or was cut off is asked again, and draws are those of one run."""
    flags = ("--temperature", 1, "--seed", 3, "--batch", 2)
    source, whole = prompts(tmp_path, given(*GOOD, "Hello")), tmp_path / "whole.jsonl"
    assert run("generate", "--in", source, "--out", whole, *flags).exit_code == 1
    expected = lines(whole)
    out = tmp_path / "answers.jsonl"
    marked = expected[0] | {"text": "as it was"}
    there = [json.dumps(entry) for entry in (marked, expected[5], expected[2])]
    out.write_text("\n".join(there) + "\n" + '{"lin')
    result = run("generate", "--in", source, "--out", out, "--resume", *flags)
    assert result.exit_code == 1 and "3 answers in" in result.stdout and "beside 2 that were there" in result.stdout
    assert lines(out) == [marked, *expected[1:]]
    again = run("generate", "--in", source, "--out", out, "--resume", *flags)
    assert "0 answers in" in again.stdout and lines(out) == [marked, *expected[1:]]


def test_files_that_cannot_be(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, given(*GOOD)), tmp_path / "answers.jsonl"
    out.write_text(json.dumps({"line": 2, "prompt": "another", "text": ""}) + "\n")
    assert "holds something" in refused("generate", "--in", source, "--out", out)
    assert "the answer to another prompt" in refused("generate", "--in", source, "--out", out, "--resume")
    out.write_text("not\nanswers\n")
    assert "holds no answers at line 1" in refused("generate", "--in", source, "--out", out, "--resume")
    assert "are one file" in refused("generate", "--in", source, "--out", source, "--resume")
    fresh = tmp_path / "fresh.jsonl"
    for arguments, message in (
        (("--in", tmp_path / "missing.jsonl", "--out", fresh), "missing.jsonl"),
        (("--in", source), "needs --out"),
        (("--out", fresh), "--out goes with --in"),
        (("--resume",), "--resume goes with --in"),
        (("--in", source, "--out", fresh, "--live"), "leave out --live"),
        (("--in", source, "--out", fresh, "--trace", tmp_path / "t.json"), "leave out --trace"),
        (("--in", source, "--out", fresh, "Sort: fig"), "leave out a prompt"),
        (("--in", source, "--out", fresh, "--batch", 0), "--batch=0"),
        (("--in", source, "--out", fresh, "--temperature", -1), "temperature"),
        (("--in", source, "--out", fresh, "--sampler", "wino", "--cache", "dkv_pd"), "dkv_pd"),
        (("--in", prompts(tmp_path, [], "none.jsonl"), "--out", fresh), "has no prompts"),
    ):
        assert message in refused("generate", *arguments), arguments
        assert not fresh.exists()


def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_ROWS", 2)
    source, out = prompts(tmp_path, given(*GOOD)), tmp_path / "answers.jsonl"
    ok("generate", "--in", source, "--out", out, "-n", 3)  # more answers to a prompt than fit at once
    assert [len(entry["text"]) for entry in lines(out)] == [3] * 5


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_an_interrupt_keeps_what_was_answered(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, given(*["Shuffle: pear fig apple"] * 400)), tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "paradec", "generate", "--in", str(source), "--out", str(out), "--batch", "4"]
    there = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).parent.parent)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=there,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while process.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, "")
    found = lines(out)
    assert [entry["line"] for entry in found] == list(range(1, len(found) + 1)) and len(found) < 400
    assert f"interrupted at {len(found)} of 400: --resume goes on" in stdout
