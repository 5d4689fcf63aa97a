"""What streamers and views are shown of open canvases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from canvases import CANVAS, PAD, tiny_module
from rich.console import Console

import paradec
from paradec.cli.watch import LiveView


class Noting:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(("put", value[0].tolist()))

    def put_draft(self, value: torch.Tensor) -> None:
        self.calls.append(("draft", value[0].tolist()))

    def end(self) -> None:
        self.calls.append(("end", []))


@pytest.mark.parametrize("rng", ["counter", "reference"])
def test_a_canvas_that_no_step_has_read_is_not_shown(rng: str) -> None:
    """Drafts are the best tokens of each step that leaves its canvas open, and nothing else."""
    model, streamer = paradec.wrap(tiny_module(), pad_token_id=PAD), Noting()
    best: list[list[int]] = []

    def note(state: Any, commit: Any) -> None:
        if not commit.selected.any():
            best.append(commit.values[0].tolist())

    sampler = paradec.samplers.create("diffusion_gemma", max_denoising_steps=3, early_stop=False)
    new = 2 * CANVAS + 8
    out = paradec.generate(
        model, [9, 10, 11], max_new_tokens=new, sampler=sampler, seed=0, rng=rng, streamer=streamer, callback=note
    )
    model.unwrap()
    kinds = [kind for kind, _ in streamer.calls]
    assert kinds == ["put", *["draft", "draft", "put"] * 3, "end"]
    drafts = [ids for kind, ids in streamer.calls if kind == "draft"]
    assert drafts == [*best[:4], *(ids[:8] for ids in best[4:])]
    assert [i for kind, ids in streamer.calls[1:] if kind == "put" for i in ids] == out.new_tokens[0].tolist()


def test_what_views_can_tell_of_a_state() -> None:
    """Undecided positions before `draft_end` hold a draft, those after it nothing; rows differ."""
    model = paradec.wrap(tiny_module(), eos_token_id=[], pad_token_id=PAD)
    sampler = paradec.samplers.create("diffusion_gemma", max_denoising_steps=9)
    seen = []

    def note(state: Any, commit: Any) -> None:
        ends, undecided = state.draft_end(), state.undecided.numpy()
        for row in range(state.batch):
            if state.running[row]:
                start, steps = int(state.block_start[row]), int(state.canvas_step[row])
                assert not undecided[row, :start].any() and undecided[row, start : state.length[row]].all()
                assert ends[row] == (start if not steps else min(start + CANVAS, state.asked[row]))
                seen.append(steps)

    paradec.generate(model, [[9, 10], [11, 12, 13]], max_new_tokens=40, sampler=sampler, seed=0, callback=note)
    model.unwrap()
    assert 0 in seen and len(set(seen)) > 3


def test_the_live_view_shows_drafts_and_counts_them_as_open() -> None:
    own = paradec.wrap(tiny_module(), eos_token_id=())
    method = paradec.samplers.create("diffusion_gemma", max_denoising_steps=4)
    state = method.start(own, [9, 10, 11], seed=0, max_new_tokens=CANVAS)
    console = Console(width=200, color_system=None)
    view = LiveView(None, console)
    method.commit(state, method.step(own, state))
    with console.capture() as capture:
        console.print(view.draw(state))
    status, row, legend = capture.get().splitlines()
    assert f"0 of {CANVAS} tokens" in status and "draft" in legend and "taken back" not in legend
    assert [int(word) for word in row.split()] == state.canvas[0, 3:].tolist()
