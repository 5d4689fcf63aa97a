"""What may be read of a state, what it makes once and when again, and what follows from a class's methods."""

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
from paradec.core.contract import CanvasState
from paradec.core.memory import Memory, MemorySpec
from paradec.samplers.masked.base import MaskedSampler, Stage, View
from paradec.samplers.masked.needs import Needs
from paradec.samplers.masked.state import MaskedState

MODEL = tiny(2)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
HOST = {
    "masks_before",
    "branches",
    "memory",
    "commits",
    "prompt_length",
    "answer_start",
    "total",
    "columns",
    "level",
    "pads",
    "reuses",
}
HOST |= {"reused", "settled", "store", "cache_state", "given", "cache", "nothing"}
"""What the lower part of the contract declares: states on the host alone have it."""


def start(name: str = "low_confidence", prompts: Any = PROMPTS, **request: Any) -> tuple[Any, MaskedState]:
    sampler = samplers.create(name)
    return sampler, sampler.start(MODEL, prompts, **{"max_new_tokens": 8, "block_length": 4, "seed": 0} | request)


def only(state: MaskedState, *rows: int) -> None:
    """Let these rows run, and no other."""
    state.running[:] = np.isin(np.arange(state.batch), rows)
    state.open_blocks(np.empty(0, np.int64))


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_other_rows_of_the_same_number_are_evaluated_as_what_they_are(cache: str) -> None:
    """What was made for two running rows does not serve two others."""
    sampler, state = start(cache=cache)
    only(state, 0, 1)
    sampler.query(state)
    only(state, 0, 2)
    _, fresh = start(cache=cache)
    only(fresh, 0, 2)
    for one, other in zip(sampler.query(state), sampler.query(fresh), strict=True):
        assert one.rows.tolist() == other.rows.tolist() == [0, 2]
        assert torch.equal(one.tokens, other.tokens)
    proposals = [sampler.step(MODEL, each) for each in (state, fresh)]
    assert torch.equal(proposals[0].values, proposals[1].values)


def memory() -> Memory:
    specs = {"seen": MemorySpec(("window",), torch.int64, fill=-1), "pairs": MemorySpec((2, "window"))}
    found = Memory(specs, 3, {"window": 4}, torch.device("cpu"))
    found["seen"] = torch.arange(12).view(3, 4)
    return found


@dataclass(frozen=True)
class Fusing(MaskedSampler):
    name = "fusing"

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        return logits * 2, {}

    def select(self, view: View) -> Tensor:
        return view.candidates


class Mixin:
    def preview(self, state: CanvasState) -> np.ndarray:
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
    """WINO's shadow alone holds NaN: nothing is written."""
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
