"""What may be read of a state, what it makes once and when again, and what follows from a class's methods."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fitting import fits, topology_of
from tiny_models import tiny
from torch import Tensor

from paradec import caches, samplers
from paradec.core.contract import CanvasState
from paradec.core.memory import Memory, MemorySpec
from paradec.core.rows import select_rows
from paradec.samplers.masked.ahead.draft_layout import Ahead
from paradec.samplers.masked.base import MaskedSampler, Stage, View
from paradec.samplers.masked.commit import to_host
from paradec.samplers.masked.device.engine import DeviceEngine
from paradec.samplers.masked.device.graphs import StepLayout, block_table
from paradec.samplers.masked.needs import OVERRIDES, Needs
from paradec.samplers.masked.state import MaskedState

MODEL = tiny(2)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
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


def test_rows_at_work_are_those_of_the_window() -> None:
    sampler, state = start()
    assert state.rows.tolist() == [0, 1, 2]
    only(state, 0, 2)
    assert state.rows.tolist() == state.window.rows.tolist() == [0, 2]
    assert select_rows(state, np.array([2, 1])).rows.tolist() == [0]
    while not state.done:
        sampler.commit(state, sampler.step(MODEL, state))
    assert state.rows.tolist() == []


# ---- the contract ---------------------------------------------------------------------------------------------------


def test_every_state_has_what_the_contract_declares() -> None:
    sampler, state = start("threshold")
    device = DeviceEngine(StepLayout.of(sampler, state, block_table(state)[0], capture=False))
    ahead = Ahead(state, 2, state.window.read(state.canvas))
    declared = set(CanvasState.__annotations__)
    assert HOST < declared
    for name in declared:
        assert hasattr(state, name) and hasattr(ahead, name), name
        if name not in HOST | {"window"}:  # the device's window is made in a step
            assert hasattr(device, name), name


@pytest.mark.parametrize("name", MASKED)
def test_methods_read_what_the_contract_declares(name: str) -> None:
    """The decision of every method, and what it previews, read no other attribute of the state."""
    if name == "mar":
        pytest.skip("its canvas is its own")
    sampler = samplers.create(name)
    if not isinstance(sampler, MaskedSampler):
        pytest.skip("no method of the base")
    model = MODEL if fits(name, MODEL) else tiny(1, topology_of(name))
    state = sampler.start(model, PROMPTS, max_new_tokens=8, seed=0, **({"steps": 4} if sampler.uses_steps else {}))
    declared = {entry for entry in dir(CanvasState) if not entry.startswith("__")} | set(CanvasState.__annotations__)
    read = set()

    class Noted:
        def __getattr__(self, entry: str) -> Any:
            read.add(entry)
            return getattr(state, entry)

    sampler.quota(Noted(), state.window.rows)  # type: ignore[arg-type]
    sampler.position_noise(Noted(), None)  # type: ignore[arg-type]
    if sampler.needs.previews:
        sampler.preview(Noted())  # type: ignore[arg-type]
    assert read and read <= declared


def test_a_state_some_steps_ahead_is_the_state_but_for_its_steps() -> None:
    sampler, state = start("freedave")
    ahead = Ahead(state, 3, state.window.read(state.canvas).index_fill(1, torch.tensor([0]), 7))
    assert isinstance(ahead, MaskedState)
    assert (ahead.row_step == state.row_step + 3).all() and (ahead.block_step == state.block_step + 3).all()
    assert ahead.remaining.tolist() == (state.remaining - 1).tolist()
    assert ahead.canvas is state.canvas and ahead.window is state.window
    assert state.row_step.tolist() == [0, 0, 0]
    twin = copy.deepcopy(ahead)
    assert (twin.row_step == ahead.row_step).all() and twin.remaining.tolist() == ahead.remaining.tolist()


# ---- what is made once ----------------------------------------------------------------------------------------------


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


def test_a_row_of_another_length_is_planned_anew() -> None:
    _, state = start(prompts=[PROMPTS[0], [1]], cache="none")

    def planned() -> dict[int, int]:
        return {int(row): int(size) for part in state.cache.plan(state) for row, size in zip(part.index, part.sizes)}

    assert planned() == {0: 13, 1: 9}
    state.length[:] = state.length[::-1].copy()
    state.forget_made()
    assert planned() == {0: 9, 1: 13}


def test_what_is_made_for_rows_is_made_once_while_they_run() -> None:
    _, state = start()
    made: list[int] = []
    for _ in range(2):
        state.while_rows_stay("it", lambda: made.append(1))
        state.open_blocks(np.empty(0, np.int64))
    assert len(made) == 1
    state.finish(np.array([1]))
    state.open_blocks(np.empty(0, np.int64))
    state.while_rows_stay("it", lambda: made.append(1))
    assert len(made) == 2


def test_what_is_copied_to_the_host_at_once_is_what_each_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, ids and rows that lack the last dimension, by one transfer."""
    given: dict[str, Tensor | None] = {
        "filled": torch.tensor([[True, False], [False, False]]),
        "tokens": torch.tensor([[2**40 + 1, -1], [0, 7]]),
        "confidence": torch.tensor([[0.25, torch.nan], [1.0, -torch.inf]], dtype=torch.float64),
        "hold_block": torch.tensor([True, False]),
        "cut": torch.tensor([5, 2**31 - 1]),
        "none": None,
    }
    plain = to_host(**given)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda tensor: False))
    copied = to_host(**given)
    assert list(plain) == list(copied) == [name for name in given if name != "none"]
    for name, array in plain.items():
        assert array.dtype == copied[name].dtype and array.shape == copied[name].shape
        assert np.array_equal(array, copied[name], equal_nan=array.dtype == np.float64)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory() -> Memory:
    specs = {"seen": MemorySpec(("window",), torch.int64, fill=-1), "pairs": MemorySpec((2, "window"))}
    found = Memory(specs, 3, {"window": 4}, torch.device("cpu"))
    found["seen"] = torch.arange(12).view(3, 4)
    return found


def test_all_rows_of_a_memory_are_read_without_a_copy() -> None:
    kept, every = memory(), np.arange(3)
    assert kept.read(every)["seen"] is kept["seen"]
    assert kept.read(every, 2)["seen"].data_ptr() == kept["seen"].data_ptr()
    assert kept.read(every, 2)["pairs"].shape == (3, 2, 2)
    assert kept.read(np.array([0, 2]), 2)["seen"].tolist() == [[0, 1], [8, 9]]


def test_what_was_read_of_a_memory_stays() -> None:
    kept = memory()
    whole, part = kept.read(np.arange(3))["seen"], kept.read(np.array([1]))["seen"]
    kept.write("seen", np.array([1, 2]), torch.full((2, 3), 99))
    assert kept["seen"].tolist() == [[0, 1, 2, 3], [99, 99, 99, 7], [99, 99, 99, 11]]
    kept.write("seen", np.arange(3), torch.zeros(3, 4, dtype=torch.int32))
    assert kept["seen"].dtype == torch.int64 and not kept["seen"].any()
    assert whole.tolist() == torch.arange(12).view(3, 4).tolist() and part.tolist() == [[4, 5, 6, 7]]
    kept.write("pairs", np.array([0]), torch.ones(1, 2, 1))
    assert kept["pairs"].sum() == 2 and kept["pairs"][0, :, 0].tolist() == [1, 1]


# ---- what follows from a class --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "settings", "gone"),
    [
        ("wino", {"threshold_back": 0}, {"revises", "processes_logits", "extra_quantities", "mask_probes"}),
        ("editing", {"editing_threshold": 1}, {"revises"}),
        ("saber", {"remask_share": 0}, {"revises"}),
        ("union", {"rules": ("threshold", "klass")}, {"extra_quantities"}),
        ("intersection", {"rules": ("threshold", "margin")}, {"extra_quantities", "processes_logits"}),
    ],
)
def test_settings_that_use_less_need_less(name: str, settings: dict[str, Any], gone: set[str]) -> None:
    most, found = samplers.get(name).needs, samplers.create(name, **settings).needs
    flags = {*OVERRIDES.values(), "mask_probes"}
    assert {flag for flag in flags if getattr(most, flag) and not getattr(found, flag)} == gone


@pytest.mark.parametrize("name", ["freedave", "lopa"])
def test_what_takes_the_steps_of_another_needs_what_that_reads(name: str) -> None:
    base, found = samplers.create("learn2pd").needs, samplers.create(name, base="learn2pd").needs
    assert base.decided_logits and found.decided_logits and found.multi_step and set(base.reads) <= set(found.reads)
    found = samplers.create(name, base="entropy_bound").needs
    assert (found.score, found.score_from) == ("minus_entropy", "sampled") and "minus_entropy" in found.reads


def test_freedave_waits_where_its_base_may() -> None:
    sampler = samplers.create("freedave", base=samplers.create("entropy", alg_temp=0.5))
    assert sampler.needs.may_wait and sampler.draws and sampler.uses_steps


@pytest.mark.parametrize("name", MASKED)
def test_registered_methods_have_the_flags_of_their_methods(name: str) -> None:
    sampler = samplers.create(name)
    if not isinstance(sampler, MaskedSampler):
        pytest.skip("no method of the base")
    for method, flag in OVERRIDES.items():
        if getattr(type(sampler), method) is getattr(MaskedSampler, method):
            assert not getattr(sampler.needs, flag), flag


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
