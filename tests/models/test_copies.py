"""Copies, pickles and torch.save of models, requests, states and outputs."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from decoding import fits, refuses, supported_fields, topology_of
from every_model import EVERY, TEXT, decode_briefly, expected, shared_model
from images import tiny_llamagen, tiny_lpd, tiny_nar
from small_models import ROWS, WRAP_IDS, decoder, tiny

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.prompts import encode
from paradec.core.protocol import decode


def copy_by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def copy_by_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": copy_by_pickle}
COPIES["torch.save"] = copy_by_torch_save


@pytest.mark.thinned
@pytest.mark.parametrize("kind", EVERY)
def test_copies_decode_the_same_independently(kind: str) -> None:
    model = shared_model(kind)
    tokens = expected(kind)
    copies = [model]
    for make_copy in COPIES.values():
        copies.append(make_copy(copies[-1]))
        assert type(copies[-1]) is type(model)
    assert len({id(copied.module) for copied in copies}) == len(copies)
    for copied in copies[1:-1]:
        if hasattr(model, "unwrap"):
            assert copied.unwrap() is copied.module
        with torch.no_grad():
            for parameter in copied.module.parameters():
                parameter.zero_()
    for unchanged in (copies[-1], model):
        assert torch.equal(decode_briefly(unchanged, kind), tokens)


@pytest.mark.parametrize("way", COPIES)
def test_copies_work_after_the_original_is_unwrapped(way: str) -> None:
    module = decoder().eval()
    model = paradec.wrap(module, prediction="same", topology="bidirectional", **WRAP_IDS)
    tokens = decode_briefly(model, "Llama")
    copied = COPIES[way](model)
    assert model.unwrap() is module
    assert torch.equal(decode_briefly(copied, "Llama"), tokens)
    late = COPIES[way](model)
    refuses(lambda: decode_briefly(late, "Llama"), "LlamaForCausalLM was unwrapped", RuntimeError)


def test_a_drafter_is_copied_with_its_base() -> None:
    base, drafter = tiny_llamagen(), tiny_llamagen(seed=1)
    sampler = samplers.create("speculative", drafter=drafter)
    request = {"class_labels": [3, 9], "seed": 0, "output_type": "latent"}
    full = paradec.generate_images(base, sampler=sampler, **request)
    for make_copy in COPIES.values():
        copied_base, copied_sampler = make_copy((base, sampler))
        assert copied_sampler.drafter is not drafter
        out = paradec.generate_images(copied_base, sampler=copied_sampler, **request)
        assert torch.equal(out.tokens, full.tokens) and out.row_nfe == full.row_nfe


def are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if hasattr(a, "tolist"):
        return a.tolist() == b.tolist()
    if hasattr(a, "tobytes") and hasattr(a, "size"):  # PIL images
        return a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(are_equal(a[key], b[key]) for key in a)
    if hasattr(a, "__dict__") and type(a).__module__.startswith("paradec"):
        fields = ({k: v for k, v in vars(value).items() if k != "_module"} for value in (a, b))
        return type(a) is type(b) and are_equal(*fields)
    return bool(a == b)


@pytest.mark.thinned
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["llada", "Bert", "Llama causal", "llamagen-c2i", "digits-maskgit", "mar"])
def test_copied_outputs_are_equal(kind: str, way: str) -> None:
    model = shared_model(kind)
    if kind in TEXT:
        arguments: dict[str, Any] = {"max_new_tokens": 8, "trace": True, "seed": 0}
        arguments |= {"cache": "dual", "block_length": 4, "keep_prefix": True} if kind == "llada" else {}
        arguments |= {"sampler": "sjd"} if kind == "Llama causal" else {}
        out = paradec.generate(model, ROWS, **arguments)
    else:
        arguments = {"sampler": samplers.create("mar", head_steps=2)} if kind == "mar" else {}
        arguments |= {"steps": 3} if kind == "digits-maskgit" else {}
        out = paradec.generate_images(model, class_labels=[1, 7], seed=0, trace=True, **arguments)
    copied = COPIES[way](out)
    assert type(copied) is type(out) and are_equal(out, copied)
    assert copied.nfe == out.nfe
    assert (copied.recorded_trace is None) == (out.recorded_trace is None)


def assert_copies_continue(model: Any, sampler: Any, state: Any, end: Callable[[Any], torch.Tensor]) -> None:
    """Repeat each of two steps, then copy the state. The original and its copies end alike, independently."""
    with torch.inference_mode():
        for _ in range(2):
            if not state.done:
                first, repeated = sampler.step(model, state), sampler.step(model, state)
                assert torch.equal(first.values, repeated.values)
                sampler.commit(state, repeated)
                refuses(partial(sampler.commit, state, first), "earlier state")
    copies = [copy.deepcopy(state), copy_by_pickle(state)]
    full = end(decode(sampler, model, state))
    for copied in copies:
        assert torch.equal(end(decode(sampler, model, copied)), full)
        assert (copied.counts == state.counts).all()


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in samplers.names() if samplers.get(name).family == "masked"])
def test_copies_of_masked_states_continue(name: str) -> None:
    model, sampler = shared_model("llada"), samplers.create(name)
    model = model if fits(name, model) else tiny(2, topology_of(name))
    cache = "dual" if verdict(sampler, caches.create("dual"), model.facts).status != REFUSED else "none"
    request = {"max_new_tokens": 8, "block_length": 4, "temperature": 0.5, "seed": 3, "trace": True, "cache": cache}
    request = supported_fields(name, request)
    state = sampler.start(model, encode(model, ROWS[:2], None, None), **request)
    assert_copies_continue(model, sampler, state, lambda state: state.canvas)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["groups", "nar", "sjd"])
def test_copies_of_image_states_continue(name: str) -> None:
    sampler, model = samplers.create(name), {"groups": tiny_lpd, "nar": tiny_nar, "sjd": tiny_llamagen}[name]()
    grid = model.grid()
    image = model.request([3, 1], grid)
    request = {"seed": 0, "guidance_scale": 2.0, "negative_prompt": image.unconditional, "trace": True}
    state = sampler.start(image.model, image.prompts, **request, **({"grid": grid} if name == "sjd" else {}))
    assert_copies_continue(image.model, sampler, state, lambda state: state.canvas)
