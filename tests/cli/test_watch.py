"""What is drawn while one waits: tokens being filled in, and what is loaded."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import pytest
from rich.console import Console
from terminals import Terminal, on_terminal

import paradec
from paradec.cli import show, watch
from paradec.cli.watch import END, LONG_RUN, UNDECIDED, LiveView, rendered
from paradec.models.adapter import Model

PROMPT = "Reverse: pear fig apple kiwi"


@pytest.fixture(scope="module")
def packaged() -> Model:
    return paradec.load()


def frames(model: Model, width: int, prompt: Any = PROMPT, height: int = 25, **request: Any) -> list[list[str]]:
    """The lines of every drawing."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view, seen = LiveView(model.tokenizer, console), []

    def draw(state: Any, commit: Any) -> None:
        with console.capture() as capture:
            console.print(view.draw(state))
        seen.append(capture.get().splitlines())

    paradec.generate(model, prompt, callback=draw, **request)
    return seen


@pytest.mark.parametrize("width", [40, 60, 200])
def test_every_drawing_fits_and_says_where_it_is(width: int, packaged: Model) -> None:
    seen = frames(packaged, width, sampler="low_confidence", max_new_tokens=100, block_length=10)
    for number, (status, *text, legend) in enumerate(seen, 1):
        assert max(map(len, (status, *text, legend))) <= width
        found = re.search(r"(\d+) of (\d+) tokens, (\d+) forwards?", status)
        decided, total, forwards = map(int, found.groups())
        assert forwards == number and (f", {decided / forwards:.1f} per forward" in status or width == 40)
        drawn = "".join(text)
        runs = re.findall(UNDECIDED + "\N{MULTIPLICATION SIGN}(\\d+)", drawn)
        shown = drawn.count(UNDECIDED) + sum(int(run) - 1 for run in runs)
        assert shown == total - decided
        assert "undecided" in legend and "end" in legend
    assert "kiwi apple fig pear" in " ".join(seen[-1][1:-1]) and END in seen[-1][-2]


def test_end_tokens_and_undecided_ones_are_told_apart(packaged: Model) -> None:
    words = packaged.tokenizer("pear fig", add_special_tokens=False)["input_ids"]
    mask, end = packaged.facts.mask_token_id, packaged.facts.eos_token_ids[0]
    text = rendered(packaged.tokenizer, [*words, mask, mask, end], ["final", "final", "undecided", "undecided", "end"])
    assert text.plain == f"pear fig{UNDECIDED * 2} {END}"
    many = LONG_RUN + 1
    assert rendered(packaged.tokenizer, [end] * many, ["end"] * many).plain == f"{END}\N{MULTIPLICATION SIGN}{many}"
    # a word after a hole is told apart from it, and stands by itself at the start
    gap = rendered(packaged.tokenizer, [words[0], mask, words[1]], ["final", "undecided", "fresh"])
    assert gap.plain == f"pear{UNDECIDED} fig"
    assert rendered(packaged.tokenizer, [mask, words[1]], ["undecided", "fresh"]).plain == f"{UNDECIDED}fig"


def test_a_long_text_is_shown_from_its_end(packaged: Model) -> None:
    (*_, last) = frames(packaged, 40, "Latin square: A B C D", height=6, max_new_tokens=64)
    assert len(last) <= 6 and END in last[-2]
    (*_, last) = frames(packaged, 60, [PROMPT] * 12, height=8, max_new_tokens=8)
    assert len(last) <= 8 and last[-2].startswith("[12] kiwi")


def test_steps_stay_to_be_seen_and_what_that_takes_is_no_time_of_the_model(
    packaged: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For so long and no longer; the command takes it out of the time that it prints."""
    request: dict[str, Any] = {"sampler": "low_confidence", "max_new_tokens": 32}
    with monkeypatch.context() as patch:
        patch.setattr(watch, "MAX_PACED", 0.05)
        view = LiveView(packaged.tokenizer, Console(file=io.StringIO(), force_terminal=True), pace=0.03)
        with view:
            paradec.generate(packaged, PROMPT, callback=view.update, **request)
    assert 0.05 <= view.slept < 0.3
    monkeypatch.setattr(watch, "PACE", 0.2)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    flags = ("--sampler", "low_confidence", "--max-new-tokens", "6", "--block-length", "6")
    begin = time.perf_counter()
    text = on_terminal(monkeypatch, 80, "generate", PROMPT, "--live", *flags)
    assert "\033[2K" in text and "kiwi apple fig pear" in text.split(UNDECIDED)[-1]
    took = time.perf_counter() - begin
    (seconds,) = re.findall(r"([\d.]+) s\n", screen.getvalue())
    assert float(seconds) < took - 0.2 * 6 + 0.01


def test_what_is_loaded_is_said_at_once_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    load = paradec.load
    monkeypatch.setattr(paradec, "load", lambda *a, **k: (seen.append(screen.getvalue()), load(*a, **k))[1])
    on_terminal(monkeypatch, 80, "generate", PROMPT)
    assert seen == ["loading the packaged model ..."]
    said, _, cost = screen.getvalue().rpartition("\r\033[2K")
    assert said == "loading the packaged model ..." and cost.startswith("5 tokens, ") and cost.count("\n") == 1


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_bar_of_a_large_checkpoint_is_for_terminals(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    show.quiet_loading()
    assert logging.is_progress_bar_enabled() is stream.isatty()
