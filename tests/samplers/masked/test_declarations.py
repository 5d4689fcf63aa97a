"""What follows from the methods and declarations of a masked sampler's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny
from torch import Tensor

from paradec import caches, samplers
from paradec.samplers.masked.loop import MaskedSampler, Stage, View
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import Needs

MODEL = tiny(2)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]


def start(name: str = "low_confidence", prompts: Any = PROMPTS, **request: Any) -> tuple[Any, MaskedState]:
    sampler = samplers.create(name)
    return sampler, sampler.start(MODEL, prompts, **{"max_new_tokens": 8, "block_length": 4, "seed": 0} | request)


@dataclass(frozen=True)
class Fusing(MaskedSampler):
    name = "fusing"

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logits * 2, {}

    def select(self, view: View) -> Tensor:
        return view.candidates


class Mixin:
    def preview(self, state: MaskedState) -> np.ndarray:
        return state.window.host_positions


def test_needs_follow_from_what_a_class_overrides() -> None:
    assert MaskedSampler.needs == Needs() and Fusing.needs == Needs(processes_logits=True)
    assert type("Mixed", (Mixin, Fusing), {}).needs == Needs(processes_logits=True, previews=True)
    ranked = type("Ranked", (Fusing,), {"needs": Needs(score="margin")})
    assert ranked.needs == type("Heir", (ranked,), {}).needs == Needs(score="margin", processes_logits=True)
    with pytest.raises(TypeError, match="of sampler class Wrong must be a paradec.samplers.masked.Needs"):
        type("Wrong", (Fusing,), {"needs": {"score": "margin"}})
    with pytest.raises(TypeError, match="scores"):
        Needs(scores="margin")  # type: ignore[call-arg]


@pytest.mark.parametrize("registry", [samplers, caches])
def test_the_device_step_takes_what_says_so_for_itself(registry: Any) -> None:
    for name in registry.names():
        found = registry.get(name)
        if getattr(found, "device_step", False):
            assert vars(found)["device_step"] is True
            assert not type("Mine", (found,), {}).device_step


def test_a_shadow_that_is_not_finite_is_seen() -> None:
    sampler, state = start("wino", cache="none")
    queries = sampler.query(state)
    outputs = [MODEL(query) for query in queries]
    width = state.window.positions.shape[1]
    outputs[0][1, width:] = torch.nan
    proposal = sampler.propose(state, outputs, queries)
    before = state.canvas.clone()
    with pytest.raises(FloatingPointError, match="row 1 at its step 0"):
        sampler.commit(state, proposal)
    assert torch.equal(before, state.canvas)
