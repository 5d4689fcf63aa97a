"""Canvases with a constraint: recorded steps, and answers that fit whatever the settings."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from canvases import tiny_module
from recorded import replays
from structured import CASES, KINDS, VOCAB, automaton_of, lettered, named, tokenizer_of

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.samplers.features.constraints import CanvasConstraint


@pytest.mark.parametrize("name", named("canvas"))
@replays("name")
def test_recorded_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    size, settings, end = len(case["vocab"]), dict(case["settings"]), case["end"]
    width, vocab = settings.pop("canvas"), max(size + 2, 16)
    model = paradec.wrap(
        tiny_module(dtype=torch.float64, vocab=vocab, canvas=width),
        eos_token_id=end,
        tokenizer=tokenizer_of(case["vocab"], end),
    )
    sampler = samplers.create("diffusion_gemma", **settings)
    monkeypatch.setattr(
        CanvasConstraint, "uniform", lambda self, state, part: np.array(numbers)[np.array(part.open) - start]
    )
    prompt = torch.tensor([[size + 1]])
    value = paradec.Regex(case["constraint"]["regex"])
    state = sampler.start(model, prompt, constraint=value, max_new_tokens=case["slots"])
    automaton, at, found = automaton_of(case), 0, list[int]()
    for number, (logits, expected) in enumerate(zip(case["logits"], case["expected"]["canvases"], strict=False)):
        start = 1 + number * width
        for step, (rows, wanted) in enumerate(zip(logits, expected["steps"], strict=False)):
            numbers = case["uniforms"][number][step]
            queries = sampler.query(state)
            queries[-1].soften = lambda logits: logits.new_zeros(*logits.shape[:-1], model.hidden_size)
            given = torch.full((1, width, vocab), -torch.inf, dtype=torch.float64)
            given[0, :, :size] = torch.tensor(rows, dtype=torch.float64)
            assert float(state.temperature(np.zeros(1, int))[0]) == pytest.approx(wanted["temperature"], rel=1e-6)
            proposal = sampler.propose(state, [given], queries)
            assert proposal.values[0].tolist() == wanted["best"]
            entropy = -proposal.quantities["minus_entropy"][0]
            assert entropy.tolist() == pytest.approx(wanted["entropy"], rel=2e-5, abs=1e-7)
            assert entropy.mean().item() == pytest.approx(wanted["mean_entropy"], rel=2e-5, abs=1e-7)
            assert math.exp(state.constraint._found[0][3].log_z()) == pytest.approx(wanted["z"], rel=2e-5)
            kept = sampler._kept(state, proposal)
            drawn = sampler._drawn(state, proposal, kept, None)
            places = kept[0].nonzero()[:, 0].tolist()
            assert [[place, int(drawn[0, place])] for place in places] == wanted["kept"]
            before = int(state.opened[0])
            sampler.commit(state, proposal)
            closed = state.done or int(state.opened[0]) > before
            assert closed == (step == len(expected["steps"]) - 1)
        text = state.canvas[0, start : start + width].tolist()
        text = text[: text.index(end) + 1] if end in text else text
        assert text == expected["tokens"][: len(text)]
        for token in expected["tokens"]:
            at = automaton.step(at, token)
        found += expected["tokens"]
    assert state.done and found == case["expected"]["tokens"] and at >= 0


@pytest.fixture(scope="module")
def canvases() -> Model:
    own = lettered()
    return paradec.wrap(
        tiny_module(dtype=torch.float64, vocab=VOCAB, canvas=4), tokenizer=own.tokenizer, eos_token_id=39
    )


QUICK = {("diffusion_gemma", "choice"), ("canvas", "schema")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.full)
        for name in ("diffusion_gemma", "canvas")
        for kind in KINDS
    ],
)
def test_every_answer_fits(name: str, kind: str, canvases: Model) -> None:
    value, fits = KINDS[kind]
    for seed, more in enumerate(({}, {"top_k": 2}, {"steps": 6}, {"top_p": 0.4}, {"max_new_tokens": 9})):
        out = paradec.generate(
            canvases,
            torch.tensor([[11, 12, 13], [14, 15, 16]]),
            sampler=name,
            constraint=value,
            seed=seed,
            **{"max_new_tokens": 12} | more,
        )
        assert all(fits(text) for text in out.text), (more, out.text)


def test_holes_and_refusals(canvases: Model) -> None:
    hole = canvases.facts.hole_id
    ids = torch.tensor([[11, hole, hole, hole, 12, hole, hole]])
    out = paradec.infill(
        canvases, input_ids=ids, constraints=[paradec.Regex("yes[0-9]{2}|[ab]{3}"), paradec.Regex("(no|[01])*")]
    )
    assert out.fills is not None
    for text, pattern in zip(out.fills[0], ("yes[0-9]{2}|[ab]{3}", "(no|[01])*"), strict=True):
        assert re.fullmatch(pattern, text)
    for more, part in (
        ({"stop_strings": "1"}, "stop_strings may end a row"),
        ({"rng": "reference", "generator": torch.Generator()}, "draws every token by itself"),
        ({"constraint": paradec.Regex("[0-9]{13}")}, "the shortest text takes 7 tokens, max_new_tokens=6"),
    ):
        asked: dict[str, Any] = {"constraint": paradec.Regex("[0-9]+"), "max_new_tokens": 6} | more
        with pytest.raises(ValueError, match=part):
            paradec.generate(canvases, torch.tensor([[11, 12]]), sampler="diffusion_gemma", **asked)
