"""What streamers and views are shown of open canvases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from canvases import CANVAS, PAD, tiny_module

import paradec


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
