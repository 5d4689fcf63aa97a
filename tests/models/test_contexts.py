"""Requests in inference mode, under autocast and in forked processes."""

import multiprocessing
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from decoding import supported_fields, topology_of
from every_model import EVERY, build_model, decode_briefly, expected, shared_model
from images import IMAGE_MODELS
from small_models import ROWS, tiny
from torch import Tensor, nn

import paradec
from paradec import samplers
from paradec.core.protocol import decode


@pytest.mark.thinned
@pytest.mark.parametrize("kind", EVERY)
def test_inference_mode_changes_nothing(kind: str) -> None:
    assert not expected(kind).requires_grad
    with torch.inference_mode():
        assert torch.equal(decode_briefly(shared_model(kind), kind), expected(kind))


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in samplers.names() if samplers.get(name).family == "masked"])
def test_states_continue_outside_of_inference_mode(name: str) -> None:
    topology, sampler = topology_of(name), samplers.create(name)
    model = shared_model("llada") if topology == "bidirectional" else tiny(2, topology)
    request = supported_fields(name, {"max_new_tokens": 8, "block_length": 4, "temperature": 0.5, "seed": 3})
    prompts = paradec.core.prompts.encode(model, ROWS[:2], None, None)
    full = decode(sampler, model, sampler.start(model, prompts, **request)).canvas
    with torch.inference_mode():
        state = sampler.start(model, prompts, **request)
        sampler.commit(state, sampler.step(model, state))
    while not state.done:
        sampler.commit(state, sampler.step(model, state))
    assert torch.equal(state.canvas, full)


def bfloat16_autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@lru_cache
def float32_model(kind: str) -> Any:
    model = tiny(2, kind) if kind == "block_causal" else build_model(kind)
    for part in vars(model).values():
        if isinstance(part, nn.Module):
            part.float()
    return model


def copy_with_autocast(model: Any) -> Any:
    """Copy a model so that its calls, and nothing else, run under autocast."""

    class Cast(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with bfloat16_autocast():
                return super().__call__(*args, **kwargs)

    cast = object.__new__(Cast)
    cast.__dict__ = model.__dict__
    return cast


@pytest.mark.thinned
@pytest.mark.parametrize(
    "kind", ["llada", "dream", "fast_dllm_v2", "Bert", "Llama causal", "Opaque", "emu3", "janus", "mar", "dit"]
)
def test_autocast_applies_only_to_the_model(kind: str) -> None:
    model = float32_model(kind)
    with bfloat16_autocast():
        actual = decode_briefly(model, kind)
    assert torch.equal(actual, decode_briefly(copy_with_autocast(model), kind))


AUTOCAST: dict[str, str] = {
    **{
        name: "llada" if topology_of(name) == "bidirectional" else topology_of(name)
        for name in samplers.names()
        if samplers.get(name).family == "masked"
    },
    **{name: "llamagen-c2i" for name in samplers.names() if samplers.get(name).family == "draft_verify"},
    "self_speculative": "nemotron causal",
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_does_not_change_samplers(name: str) -> None:
    kind = AUTOCAST[name]
    model = float32_model(kind)

    def run(model: Any) -> Tensor:
        sampler = samplers.create(name, **({"drafter": model} if name == "speculative" else {}))
        if kind in IMAGE_MODELS:
            request = {"class_labels": [3, 9], "seed": 0, "output_type": "latent", "sampler": sampler}
            return paradec.generate_images(model, **request).tokens
        request = {"max_new_tokens": 8, "temperature": 0.7, "seed": 1, "sampler": sampler}
        request = supported_fields(name, request | {"block_length": 4}) if sampler.family == "masked" else request
        return paradec.generate(model, ROWS, **request).new_tokens

    with bfloat16_autocast():
        actual = run(model)
    assert torch.equal(actual, run(copy_with_autocast(model)))


def run_in_child(function: Callable[[], Any]) -> Any:
    forked = multiprocessing.get_context("fork")
    result = forked.Queue()
    forked.Process(target=lambda: result.put(function()), daemon=True).start()
    return result.get(timeout=120)


@pytest.mark.thinned
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("kind", ["llada", "Bert", "Llama bidirectional", "Llama causal", "Opaque", "llamagen-c2i"])
def test_a_forked_process_decodes(kind: str) -> None:
    model, full = shared_model(kind), expected(kind)
    assert run_in_child(lambda: decode_briefly(model, kind).tolist()) == full.tolist()
    assert torch.equal(decode_briefly(model, kind), full)
