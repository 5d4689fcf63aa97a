"""Masked samplers: equality with the plain loop in the docstring of `loop.py`, declared needs, and left-out logits."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from small_models import END, MASK, full_mask, tiny
from torch import Tensor

import paradec
from paradec import FixedBlocks, samplers
from paradec.core.protocol import decode
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.samplers.masked import loop
from paradec.samplers.masked.loop import MaskedSampler, Stage, View
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import Needs

(PLAIN_LOOP,) = re.findall(r"```python\n(.*?)```", loop.__doc__ or "", re.DOTALL)
SETTINGS: list[dict[str, Any]] = [
    {"threshold": 0.9, "block_length": 4},
    {"threshold": 0.2, "block_length": 32},
    {"threshold": 0.5, "block_length": 5, "end_ids": (END, 3, 17)},
    {"block_length": 3},
    {"block_length": 4, "end_ids": (END, 8, 20)},
    {"block_length": 4, "steps": 2},
    {"block_length": 6, "steps": 4, "end_ids": (END, 11)},
]


def test_the_plain_loop_has_at_most_60_lines() -> None:
    assert len(PLAIN_LOOP.splitlines()) <= 60


@pytest.mark.thinned
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samplers_equal_the_plain_loop(settings: dict[str, Any], shift: int, cache: str | None) -> None:
    draw, namespace = random.Random(str(settings)), dict[str, Any]()
    exec(PLAIN_LOOP, namespace)
    ends, length = settings.get("end_ids", (END,)), settings["block_length"]
    model = tiny(1, prediction="shifted" if shift else "same", seed=length, ends=ends)
    rows = [[draw.randrange(MASK) for _ in range(draw.randint(1, 9))] for _ in range(5)]
    rows = [
        [MASK if i % 3 == 2 and index % 2 else token for i, token in enumerate(row)] for index, row in enumerate(rows)
    ]
    rows.append([MASK] * 4)
    request: dict[str, Any] = {"max_new_tokens": 13, "blocks": FixedBlocks(length), "cache": cache}
    if "threshold" in settings:
        request["sampler"] = paradec.samplers.create("threshold", threshold=settings["threshold"])
    else:
        request["sampler"] = "low_confidence"

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model.module(ids, attention_mask=full_mask(ids.shape[1])).logits

    for row in rows:
        ids = row + [MASK] * 13
        if "steps" in settings:
            request["steps"] = settings["steps"] * -(-(len(ids) - ids.index(MASK)) // length)
        out = paradec.generate(model, [row], holes_eos_inf=False, **request)
        with torch.inference_mode():
            expected = namespace["decode"](logits, ids, MASK, shift=shift, **{"end_ids": ends} | settings)
        assert out.sequences[0, : len(expected)].tolist() == expected
        assert out.finished == [len(expected) < len(ids) or expected[-1] in ends]


MODEL = tiny(2)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]


def start(name: str = "low_confidence", prompts: Any = PROMPTS, **request: Any) -> tuple[Any, MaskedState]:
    sampler = samplers.create(name)
    return sampler, sampler.start(MODEL, prompts, **{"max_new_tokens": 8, "block_length": 4, "seed": 0} | request)


@dataclass(frozen=True)
class DoublesLogits(MaskedSampler):
    name = "doubles_logits"

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logits * 2, {}

    def select(self, view: View) -> Tensor:
        return view.candidates


class Mixin:
    def preview(self, state: MaskedState) -> np.ndarray:
        return state.window.host_positions


def test_needs_follow_from_what_a_class_overrides() -> None:
    assert MaskedSampler.needs == Needs() and DoublesLogits.needs == Needs(processes_logits=True)
    assert type("Mixed", (Mixin, DoublesLogits), {}).needs == Needs(processes_logits=True, previews=True)
    ranked = type("Ranked", (DoublesLogits,), {"needs": Needs(score="margin")})
    assert ranked.needs == type("Heir", (ranked,), {}).needs == Needs(score="margin", processes_logits=True)
    with pytest.raises(TypeError, match="of sampler class Wrong must be a paradec.samplers.masked.Needs"):
        type("Wrong", (DoublesLogits,), {"needs": {"score": "margin"}})
    refuses(lambda: Needs(scores="margin"), "scores", TypeError)


def test_nan_logits_of_winos_shadow_positions_raise_an_error() -> None:
    sampler, state = start("wino", cache="none")
    queries = sampler.query(state)
    outputs = [MODEL(query) for query in queries]
    outputs[0][1, state.window.positions.shape[1] :] = torch.nan
    proposal = sampler.propose(state, outputs, queries)
    before = state.canvas.clone()
    refuses(lambda: sampler.commit(state, proposal), "row 1 at its step 0", FloatingPointError)
    assert torch.equal(before, state.canvas)


ROWS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 9]
NEW = 12


class ColumnRecorder:
    """A model that records how many columns of logits each call requests."""

    def __init__(self, model: Model):
        self.model, self.widths = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Query, *store: Any) -> Tensor:
        self.widths.append(query.wanted.shape[1])
        logits = self.model(query, *store)
        assert logits.shape[1] == self.widths[-1]
        return logits


def decode_recorded(model: Model, sampler: Any, rows: list[list[int]] = ROWS, **request: Any) -> tuple[Any, list[int]]:
    recorder = ColumnRecorder(model)
    state = sampler.start(recorder, rows, max_new_tokens=NEW, **{"seed": 3, **request})
    return decode(sampler, recorder, state), recorder.widths


CASES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"block_length": 6}),
    ("low_confidence", {"cache": "dual"}),
    ("margin", {"temperature": 0.7, "cache": "prefix", "block_length": 4}),
    ("entropy", {"temperature": 0.5, "top_k": 9}),
    ("random", {"temperature": 1.0, "guidance_scale": 1.5, "cache": "dual"}),
    ("klass", {}),
    ("persistence", {"block_length": 6}),
    ("maskgit", {"temperature": 1.0, "steps": 5}),
]


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize(("name", "request_"), CASES, ids=[name for name, _ in CASES])
def test_leaving_out_logits_changes_no_token(name: str, request_: dict, prediction: str, monkeypatch: Any) -> None:
    model = tiny(2, prediction=prediction)
    sampler = samplers.create(name, **({"final_temperature": 0.5} if name == "maskgit" else {}))
    wide_state, wide = decode_recorded(model, sampler, **request_)
    monkeypatch.setattr(loop, "MIN_SAVED_LOGITS", 0)
    narrow_state, narrow = decode_recorded(model, sampler, **request_)
    assert torch.equal(wide_state.canvas, narrow_state.canvas) and (wide_state.nfe == narrow_state.nfe).all()
    if name == "klass":  # its stage reads whole windows
        assert wide == narrow
    else:
        assert len(wide) == len(narrow) and sum(narrow) < 0.8 * sum(wide)
