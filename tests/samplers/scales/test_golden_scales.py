"""VAR and CoDe against recorded runs of their public code."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from next_image import assert_checksum, case, cases, file
from places import GOLDEN
from recorded import replays
from torch import Tensor

import paradec
from paradec.models.images.multi_scale_vq import MultiScaleVQ, load_multi_scale_vq
from paradec.models.images.var import VARModel, load_var
from paradec.samplers.pictures.scales import VAR, CoDe


@lru_cache
def vae(name: str, dtype: torch.dtype = torch.float32) -> MultiScaleVQ:
    """`name`: "var/vae"."""
    return load_multi_scale_vq(file("", f"{name}.safetensors")).to(dtype)


@lru_cache
def model(system: str, name: str, dtype: torch.dtype = torch.float32) -> VARModel:
    said, _ = case(system, f"{name}.config")
    return load_var(file(system, f"{name}.safetensors"), vq=vae(said["vae"], dtype), dtype=dtype)


def dtype_of(record: dict[str, Any]) -> torch.dtype:
    """A margin this small is no matter of float32; torch draws other numbers in float64."""
    return torch.float32 if record["margin"] >= 1e-4 or "manual_seed" in record["draws"] else torch.float64


class Draws:
    """The recorded draws of a case, in place of ours."""

    def __init__(self, record: dict[str, Any], arrays: dict[str, Tensor]):
        self.steps, self.arrays = record["steps"], arrays
        self.settings, self.draws = record["settings"], record["draws"]
        self.generator: torch.Generator | None = None
        if "manual_seed(" in self.draws:
            self.seed = int(self.draws.split("manual_seed(")[1].split(")")[0])
            self.generator = torch.Generator().manual_seed(self.seed)

    def tokens(self, index: int, logits: Tensor) -> Tensor:
        if self.generator is None:
            u = torch.tensor(self.steps[index]["u"], dtype=torch.float64).unsqueeze(-1)
            return (logits.double().softmax(-1).cumsum(-1) <= u).sum(-1)
        return torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=self.generator).view(logits.shape[:2])


@dataclass(frozen=True)
class ReplayedVAR(VAR):
    draws: Any = field(default=None, compare=False)

    def draw(self, state: Any, logits: Tensor) -> Tensor:
        return self.draws.tokens(state.index, logits)

    def noise(self, state: Any, logits: Tensor) -> Tensor:
        return -self.draws.arrays[f"exponential.{state.index}"].log()


@dataclass(frozen=True)
class ReplayedCoDe(CoDe):
    draws: Any = field(default=None, compare=False)

    def draw(self, state: Any, logits: Tensor) -> Tensor:
        draws = self.draws
        if draws.generator is not None and state.index == self.split and state.tokens[0, 0] >= 0:
            # both models' generators start anew, and the refiner's first draws are for scales that it throws away
            draws.generator.manual_seed(draws.seed)
            for side in state.scales[: self.split]:
                draws.tokens(-1, torch.zeros(state.batch, side**2, logits.shape[-1]))
        return self.draws.tokens(state.index, logits)


def run(sampler: Any, network: VARModel, record: dict[str, Any], arrays: dict[str, Tensor], **request: Any) -> Any:
    """Decode a case, and compare every step."""
    settings = record["settings"]
    state = sampler.start(
        network, settings["labels"], guidance_scale=1 + settings["cfg"], top_p=settings["top_p"] or None, **request
    )
    smooth = settings.get("more_smooth", False)
    atol = 1e-3 if smooth else 1e-4
    with torch.inference_mode():
        for index, step in enumerate(record["steps"]):
            before, state_before = state.index, copy.copy(state)
            branches = state.branches
            (query,) = sampler.query(state)
            drafting = isinstance(sampler, CoDe) and sampler.drafts(state)
            source = sampler.drafter if drafting else network
            if "model" in step and step["model"]:
                assert drafting == (step["model"] == "draft")
            assert step["scale"] == state.index
            assert query.forwarded.tolist() == [step["evaluated"]] * state.batch
            answer = source(query)
            guided = sampler.guided(state, answer.logits)
            assert_checksum(guided, step["guided_logits"], 2e-5)
            if f"guided_logits.{index}" in arrays:
                torch.testing.assert_close(guided.float(), arrays[f"guided_logits.{index}"], atol=1e-4, rtol=0)
            if answer.logits.numel() == step["raw_logits"][0]:  # a half without weight is not evaluated
                assert_checksum(answer.logits, step["raw_logits"])
            assert step["rows"] == 2 * state.batch
            if branches == 2:  # without guidance the reference evaluates a half that nothing reads
                compare_store(query.store, step, state.ends[state.index])
            proposal = sampler.step(network, state)
            assert proposal.values.tolist() == step["tokens"]
            sampler.commit(state, proposal)
            assert state.index == before + 1
            if not smooth:
                assert_checksum(state.feature_map, step["f_hat"])
            if proposal.following is not None and not smooth:
                side = state.scales[state.index]
                assert_checksum(proposal.following.mT.unflatten(-1, (side, side)), step["next_input"])
            if "soft_codes" in step:
                filtered = sampler.filtered(state_before, guided)
                distribution = sampler.blended(state_before, filtered, torch.eye(filtered.shape[-1]))
                assert_checksum(distribution, step["soft_codes"], 1e-3)
    assert state.done and state.store is None
    torch.testing.assert_close(state.feature_map.float(), arrays["f_hat"], atol=atol, rtol=0)
    tokens = state.tokens if state.codes is None else state.codes
    images = network.decode(tokens)
    assert list(images.shape) == record["image_shape"]
    assert_checksum(images, record["image"], 1e-3 if smooth else 1e-4)
    if "image" in arrays:
        torch.testing.assert_close(images[:1].float(), arrays["image"], atol=atol, rtol=0)
    return state


def compare_store(store: Any, step: dict[str, Any], stop: int) -> None:
    """Keys and values of a call, with the reference's cache; the last scale's are not kept by ours."""
    assert step["cached"] == stop
    if store.data is not None and store.shape[4] >= stop:
        for layer, pair in zip(store.data, step["kv"], strict=True):
            for ours, theirs in zip(layer, pair, strict=True):
                assert_checksum(ours[:, :, :stop], theirs)


@pytest.mark.parametrize("name", cases("var", "steps"))
@replays("name", "var/")
def test_var_replays(name: str) -> None:
    record, arrays = case("var", name)
    settings = record["settings"]
    sampler = ReplayedVAR(smooth=settings["more_smooth"], draws=Draws(record, arrays))
    if sampler.draws.generator is not None and settings["more_smooth"]:
        # the reference draws tokens and noise from one generator; the noise is recorded, and the tokens too
        sampler.draws.tokens = lambda index, logits: torch.tensor(record["steps"][index]["tokens"])
    network = model("var", record["model"], dtype_of(record))
    state = run(sampler, network, record, arrays, top_k=settings["top_k"] or None)
    assert state.nfe.tolist() == [record["calls"]] * state.batch


@pytest.mark.parametrize("name", cases("code", "steps"))
@replays("name", "code/")
def test_code_replays(name: str) -> None:
    record, arrays = case("code", name)
    settings = record["settings"]
    refiner = model("var", record["refiner"], dtype_of(record))
    sampler = ReplayedCoDe(
        drafter=model("code", record["drafter"], dtype_of(record)),
        split=settings["draft_steps"],
        top_ks=tuple(settings["top_k"]),
        temperatures=tuple(settings["temperature"]),
        draws=Draws(record, arrays),
    )
    state = run(sampler, refiner, record, arrays)
    assert state.draft_nfe.tolist() == [record["draft_calls"]] * state.batch
    assert state.nfe.tolist() == [record["refine_calls"]] * state.batch
    split = settings["draft_steps"]
    if 0 < split < len(state.scales):
        inputs = state.inputs[:, : state.ends[split] - 1]
        assert_checksum(inputs, record["handed_over_inputs"])
        if "handed_over.inputs" in arrays:
            torch.testing.assert_close(inputs.float(), arrays["handed_over.inputs"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", cases("var", "reconstruction"))
@replays("name", "var/")
def test_pictures_become_codes(name: str) -> None:
    record, arrays = case("var", name)
    vq, scales = vae(f"var/{record['model']}"), tuple(record["patch_nums"])
    with torch.no_grad():
        features = vq.features(arrays["picture"])
        codes = vq.quantised(features, scales)
        inputs, total = vq.inputs(torch.cat([vq.codes[ids] for ids in codes], 1), scales)
        back = vq.decode(total).clamp(-1, 1)
    torch.testing.assert_close(features, arrays["features"], atol=1e-4, rtol=0)
    assert [ids.tolist() for ids in codes] == record["codes"]
    torch.testing.assert_close(inputs, arrays["teacher_inputs"], atol=1e-4, rtol=0)
    assert_checksum(inputs, record["teacher_inputs"], 1e-4)
    assert_checksum(back, record["reconstruction"], 1e-4)
    torch.testing.assert_close(back, arrays["reconstruction"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", cases("var", "logits"))
@replays("name", "var/")
def test_all_scales_at_once(name: str) -> None:
    record, arrays = case("var", name)
    network = model("var", record["model"])
    ids = torch.cat([torch.tensor(scale) for scale in record["codes"]], 1)
    with torch.no_grad():
        given, _ = network.vq.inputs(network.vq.codes[ids], network.module.scales)
        torch.testing.assert_close(given, arrays["inputs"], atol=1e-4, rtol=0)
        logits = network.module(torch.tensor(record["labels"]), arrays["inputs"])
    torch.testing.assert_close(logits, arrays["logits"], atol=1e-4, rtol=0)


def test_single_files_are_told_apart() -> None:
    folder = GOLDEN / "next-image" / "var"
    loaded = paradec.load(folder / "model-c.safetensors", vq=folder / "vae.safetensors")
    assert isinstance(loaded, VARModel)
