"""The live view of tokens while they are decoded."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

import paradec
from paradec.cli.watch import END, UNDECIDED, LiveView
from paradec.models.adapter import Model

PROMPT = "Reverse: pear fig apple kiwi"


def draw_frames(model: Model, width: int, prompt: Any = PROMPT, height: int = 25, **request: Any) -> list[list[str]]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view, seen = LiveView(model.tokenizer, console), []

    def draw(state: Any, commit: Any) -> None:
        with console.capture() as capture:
            console.print(view.draw(state))
        seen.append(capture.get().splitlines())

    paradec.generate(model, prompt, callback=draw, **request)
    return seen


@pytest.mark.thinned
@pytest.mark.parametrize("width", [40, 60, 200])
def test_every_frame_fits_and_counts_the_tokens(width: int, packaged: Model) -> None:
    seen = draw_frames(packaged, width, sampler="low_confidence", max_new_tokens=100, block_length=10)
    for number, (status, *text, legend) in enumerate(seen, 1):
        assert max(map(len, (status, *text, legend))) <= width
        match = re.search(r"(\d+) of (\d+) tokens, (\d+) forwards?", status)
        decided, total, forwards = map(int, match.groups())
        assert forwards == number and (f", {decided / forwards:.1f} per forward" in status or width == 40)
        drawn = "".join(text)
        runs = re.findall(UNDECIDED + "\N{MULTIPLICATION SIGN}(\\d+)", drawn)
        shown = drawn.count(UNDECIDED) + sum(int(run) - 1 for run in runs)
        assert shown == total - decided
        assert "undecided" in legend and "end" in legend
    assert "kiwi apple fig pear" in " ".join(seen[-1][1:-1]) and END in seen[-1][-2]
