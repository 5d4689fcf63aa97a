"""`paradec chat`: turns, commands, prefix reuse, and Ctrl-C."""

import itertools
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import interrupts, ok, refused, run
from small_models import END, MASK, VOCAB, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import paradec
from paradec.cli.chat import COMMANDS, Conversation
from paradec.cli.watch import LiveView
from paradec.cli.work import Work

TURNS = ["Sort: pear fig apple", "Reverse: kiwi fig cow dog"]


def test_turns_are_answered_one_by_one() -> None:
    model = paradec.load()
    assert ok("chat", stdin="\n\n".join(TURNS) + "\n").splitlines() == paradec.generate(model, TURNS).text
    assert ok("chat", stdin=TURNS[0] + "\n/quit\n" + TURNS[1]) == "apple fig pear\n"
    assert ok("chat", stdin="") == ""
    # a byte-order mark and the "\r" of a line end are ignored; a "\r" inside a line does not end the turn
    odd = b"\xef\xbb\xbf" + TURNS[0].encode() + b"\r\nReverse: kiwi fig\rcow dog\n"
    assert ok("chat", stdin=odd).splitlines() == paradec.generate(model, TURNS).text
    settings = ("--sampler", "low_confidence", "--max-new-tokens", 8, "--temperature", 1, "--seed", 3)
    request: dict[str, Any] = {"sampler": "low_confidence", "max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    assert ok("chat", *settings, stdin=TURNS[1]) == paradec.generate(model, TURNS[1], **request).text + "\n"


def test_commands_print_and_write_files(tmp_path: Path) -> None:
    trace = tmp_path / "steps.json"
    lines = ["/sampler", "/sampler credit(threshold=0.8)", TURNS[0], "/trace", f"/trace {trace}", "/reset", "/help"]
    printed = ok("chat", stdin="\n".join(lines)).splitlines()
    assert printed[0] == "threshold(threshold=0.9, quota_per_step='none'), cache none"
    assert printed[1].startswith("credit(threshold=0.8, ") and printed[2] == "apple fig pear"
    steps = json.loads(trace.read_text())["steps"]
    assert "apple fig pear" in printed[3] and printed[3].split()[0] == "1"
    assert f"{len(steps)} step in {trace}" in printed or f"{len(steps)} steps in {trace}" in printed
    assert all(any(line.startswith(command) for line in printed) for command in COMMANDS)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Hello", "vocabulary: 'Hello'"),
        ("/sampler treshold", "did you mean 'threshold'"),
        ("/sampler taylorseer", "is of family 'forecast'"),
        ("/trace", "no answer yet"),
        ("/no", "unknown command: '/no'"),
    ],
)
def test_errors_do_not_end_the_chat(line: str, message: str) -> None:
    result = run("chat", stdin=f"{line}\n{TURNS[0]}\n")
    assert (result.exit_code, result.stdout) == (1, "apple fig pear\n")
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_wrong_caches_and_encodings_are_refused() -> None:
    assert "no-such-cache" in refused("chat", "--cache", "no-such-cache")
    assert "not UTF-8" in run("chat", stdin=b"Sort: \xe4pfel\n").stderr


def create_work(model: Any, cache: str = "none") -> Work:
    sampler = paradec.samplers.create("low_confidence")
    request: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0, "guidance_scale": 1.0}
    work = Work("generate", model, sampler, request | {"cache": paradec.caches.create(cache)}, None, 1, True)
    work.choose_cache()
    return work


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create a tokenizer with one word per id of the tiny models and a chat template."""
    core = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{END}", mask_token=f"w{MASK}")
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}w2"
    return tokenizer


@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
def test_later_turns_reuse_the_prefix(topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny(2, topology)
    model.tokenizer = make_tokenizer()
    conversation, turns = Conversation(create_work(model), None, history=True), []
    assert conversation.work.request["cache"].name == ("dual" if topology == "bidirectional" else "block")
    for turn in ("w3 w4 w5 w6 w7 w8", "w9 w10 w11", "w12"):
        conversation.answer(turn)
        turns.append({"role": "user", "content": turn})
        assert (conversation.last_output.cost.reused_tokens[0] > 0) == (len(turns) > 1)
        if topology == "block_causal":
            full = paradec.generate(model, turns, sampler="low_confidence", max_new_tokens=8, cache="block", seed=0)
            assert torch.equal(full.new_tokens, conversation.last_output.new_tokens) and full.cost.reused_tokens[0] == 0
        turns.append({"role": "assistant", "content": conversation.last_output.text})
    assert conversation.turns == turns
    assert capsys.readouterr().out.splitlines() == [turn["content"] for turn in turns[1::2]]
    conversation.reset()
    assert conversation.turns == [] and conversation.prefix is None


def test_a_terminal_shows_tokens_and_their_rate(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(LiveView, "update", lambda view, state, commit: shown.append(int(state.undecided.sum())))
    shown: list[int] = []
    model = tiny(1)
    model.tokenizer = make_tokenizer()
    Conversation(create_work(model), None, history=True).answer("w3 w4")
    assert len(shown) > 1 and shown == sorted(shown, reverse=True) and shown[-1] == 0
    assert re.search(r"\d tokens?, \d+ forwards?, [\d.]+ s, [\d.]+ tokens/s", capsys.readouterr().out)


def test_ctrl_c_stops_the_answer_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = paradec.load(), itertools.count(1)

    def interrupt(module: Any, args: Any) -> None:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    model.module.register_forward_pre_hook(interrupt)
    monkeypatch.setattr(paradec, "load", lambda *_, **__: model)
    lines = ["/sampler", "Shuffle: pear fig apple", "/sampler threshold", TURNS[0]]
    with interrupts():
        printed = ok("chat", "--sampler", "low_confidence", stdin="\n".join(lines)).splitlines()
    assert printed[0].startswith("low_confidence()") and printed[2].startswith("threshold(")
    assert printed[1:4:2] == ["(stopped; this turn is forgotten)", "apple fig pear"]
