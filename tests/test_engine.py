"""The device-side step against the plain loop, uncaptured; that it could be captured; and when it is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import END, MASK, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import paradec
from paradec import engine, samplers
from paradec.generate import _device_loop
from paradec.models.adapter import Model
from paradec.protocol import decode
from paradec.samplers.masked_state import MaskedState

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14]]
HOLES = [[1, MASK, 3, MASK, MASK, 6, 7, 8, 9, MASK, 11], [5, 6, MASK, 8]]
MODELS = {prediction: tiny(2, prediction=prediction) for prediction in ("same", "shifted")}


def start(sampler: str, model: Model, prompt: list[list[int]] = ROWS, **request) -> tuple[object, MaskedState]:
    settings = request.pop("settings", {})
    method = samplers.create(sampler, **settings)
    request = {"max_new_tokens": 12, "block_length": 4, "seed": 1} | request
    return method, method.start(model, prompt, **request)


def assert_same(model: Model, sampler: str, *, poll_every: int = 1, **request) -> MaskedState:
    """Decode both ways, and compare everything that an output is made of."""
    method, plain = start(sampler, model, **request)
    decode(method, model, plain)
    method, ours = start(sampler, model, **request)
    engine.decode(method, model, ours, capture=False, poll_every=poll_every)
    assert torch.equal(ours.canvas, plain.canvas)
    np.testing.assert_array_equal(ours.counts, plain.counts)
    for name in ("end", "stopped", "running", "decided", "row_step"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name), err_msg=name)
    assert ours.done and ours.progress == plain.progress
    return ours


@pytest.mark.parametrize(
    ("sampler", "prediction", "cache"),
    [(name, *pair) for name in sorted(engine.SAMPLERS) for pair in (("same", "none"), ("shifted", "dual"))]
    + [("threshold", "shifted", "none"), ("threshold", "same", "prefix"), ("low_confidence", "shifted", "prefix")],
)
def test_same_tokens_and_counts_as_the_plain_loop(sampler: str, prediction: str, cache: str) -> None:
    assert_same(MODELS[prediction], sampler, cache=cache)


@pytest.mark.parametrize(
    ("sampler", "request_"),
    [
        ("low_confidence", {"steps": 6, "cache": "prefix"}),
        ("low_confidence", {"temperature": 0.9, "eos_early_stop": False}),
        ("entropy", {"steps": 9, "temperature": 0.5, "top_p": 0.9}),
        ("topk_margin", {"settings": {"alg_temp": 0.4}, "steps": 6, "block_length": 6, "cache": "dual"}),
        ("maskgit_plus", {"block_length": 12, "steps": 5, "cache": "prefix"}),
        ("threshold", {"settings": {"threshold": 0.2}, "confidence_eos_eot_inf": True, "cache": "dual"}),
        ("factor", {"logits_eos_inf": True, "suppress_tokens": (3, 4), "temperature": 0.7, "cache": "prefix"}),
        ("random", {"steps": 9, "block_length": 5}),  # three blocks, the last one shorter
    ],
)
def test_same_with_other_requests(sampler: str, request_: dict) -> None:
    assert_same(MODELS["same"], sampler, **request_)


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("block_length", [None, 3])
def test_same_where_masks_stand_inside_the_prompt(block_length: int | None, cache: str) -> None:
    request = {"prompt": HOLES, "max_new_tokens": None, "block_length": block_length, "cache": cache}
    assert_same(MODELS["shifted"], "threshold", **request)


@pytest.mark.parametrize(("cache", "poll_every"), [("none", 5), ("prefix", 3)])
def test_surplus_steps_change_and_count_nothing(cache: str, poll_every: int) -> None:
    assert_same(MODELS["same"], "threshold", cache=cache, poll_every=poll_every, settings={"threshold": 0.3})


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_rows_end_at_their_end_token(cache: str) -> None:
    # three end ids in a vocabulary of 41: rows end at different steps, inside and between blocks
    model = tiny(2, seed=3, ends=(END, 7, 21, 30, 12, 2))
    rows = [[i, i + 1, i + 5] for i in range(8, 20)]
    state = assert_same(model, "threshold", prompt=rows, cache=cache, max_new_tokens=16)
    assert 0 < state.stopped.sum() < len(rows) and len(set(state.end.tolist())) > 3


def test_a_step_that_no_row_needs_changes_nothing() -> None:
    model = MODELS["same"]
    method, state = start("threshold", model, cache="dual")
    with torch.inference_mode():
        device = engine.Engine(method, model, state, capture=False)
        device.step("full", 3, state.canvas.shape[1])
        kept = ("canvas", "counts", "row_step", "block_step", "block_index", "running", "end", "flags")
        before = {name: getattr(device, name).clone() for name in kept}
        stored = [layer[:, :-1].clone() for layer in state.store.layer_keys.values()]
        written = state.store.token_at_write.clone()
        device.step("full", 3, state.canvas.shape[1])  # all rows are inside their block now
        device.live.fill_(False)  # as while a graph is captured
        device.step("window", 3, 4)
    columns = state.canvas.shape[1]
    assert torch.equal(device.canvas[:, :columns], before["canvas"][:, :columns])
    assert all(torch.equal(getattr(device, name), value) for name, value in before.items() if name != "canvas")
    assert torch.equal(state.store.token_at_write, written)
    kept_keys = [layer[:, :-1] for layer in state.store.layer_keys.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept_keys, stored, strict=True))


def test_rows_of_one_phase_leave_the_others_alone() -> None:
    model = MODELS["same"]
    method, state = start("low_confidence", model, cache="dual")
    columns = state.canvas.shape[1]
    with torch.inference_mode():
        device = engine.Engine(method, model, state, capture=False)
        device.step("full", 3, state.canvas.shape[1])
        device.block_step[1] = 0  # one row opens a block
        before, written = device.canvas.clone(), state.store.token_at_write.clone()
        keys = {layer: kept.clone() for layer, kept in state.store.layer_keys.items()}
        device.step("window", 3, 4)
        after = state.store.layer_keys
        assert all(torch.equal(after[layer][1, :columns], kept[1, :columns]) for layer, kept in keys.items())
        assert not torch.equal(after[1][0], keys[1][0])
        device.step("window", 2, 4)  # as a call of these rows alone
    assert device.row_step.tolist() == [3, 1, 3]
    assert torch.equal(device.canvas[1, :columns], before[1, :columns])
    assert torch.equal(state.store.token_at_write[1], written[1])
    assert not torch.equal(device.canvas[0, :columns], before[0, :columns])


def only_tensors(given: object, **_: object) -> torch.Tensor:
    assert isinstance(given, torch.Tensor), f"{type(given).__name__} would be copied to the device"
    return given


class Capturable(TorchDispatchMode):
    """Refuse what a CUDA graph cannot hold: values that the host waits for, and shapes that depend on them."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.REFUSED and not name.startswith("_unique"), f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sampler", "cache"),
    [(name, "dual") for name in sorted(engine.SAMPLERS)] + [("threshold", "none"), ("entropy", "prefix")],
)
def test_a_step_waits_for_nothing(sampler: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["shifted"]
    method, state = start(sampler, model, cache=cache, temperature=0.5)
    with torch.inference_mode():
        device = engine.Engine(method, model, state, capture=False)
        columns = state.canvas.shape[1]
        device.step("full", 3, columns)  # the store is allocated once
        as_tensor = torch.as_tensor
        # nor may anything come from the host
        monkeypatch.setattr(torch, "as_tensor", lambda given, **kw: as_tensor(only_tensors(given), **kw))
        monkeypatch.setattr(torch, "tensor", only_tensors)
        monkeypatch.setattr(torch, "from_numpy", only_tensors)
        with Capturable():
            device.step("full", 3, columns)
            device.step("full", 2, columns)
            if cache != "none":
                device.step("window", 3, columns)
                device.step("window", 1, columns)


def test_bad_logits_name_the_row_and_write_nothing_to_it() -> None:
    model = tiny(1)
    with torch.no_grad():  # token 14 stands in row 2 alone
        model.module.model.embed_tokens.weight[14] = torch.nan
    for run in (
        lambda method, state: decode(method, model, state),
        lambda method, state: engine.decode(method, model, state, capture=False),
    ):
        method, state = start("threshold", model)
        with pytest.raises(FloatingPointError, match="row 2 at its step 0"):
            run(method, state)
        assert state.canvas[2, 1:13].eq(MASK).all()


@pytest.mark.parametrize(
    ("sampler", "request_", "reason"),
    [
        ("credit", {}, "sampler 'credit' keeps something on the host"),
        ("random", {"settings": {"order": "block"}}, "'random' with these settings remembers"),
        ("threshold", {"settings": {"quota_per_step": "carry"}, "steps": 3}, "'threshold' with these settings"),
        ("threshold", {"cache": "dkv_decode"}, "cache 'dkv_decode' chooses on the host"),
        ("threshold", {"guidance_scale": 2.0}, "guidance evaluates two rows"),
        ("threshold", {"rng": "reference", "prompt": [[1, 2]]}, "rng='reference' draws on the host"),
        ("threshold", {"stop": paradec.Prophet(answer=range(2))}, "stop rules other than the end token"),
    ],
)
def test_what_it_cannot_serve_is_named(sampler: str, request_: dict, reason: str) -> None:
    model = MODELS["same"]
    method, state = start(sampler, model, **request_)
    assert reason in engine.refusal(method, model, state)
    with pytest.raises(ValueError, match="device-side step cannot serve this request"):
        engine.decode(method, model, state, capture=False)


def test_methods_of_ones_own_are_not_taken_for_ours() -> None:
    class Mine(samplers.get("threshold")):
        pass

    _, state = start("threshold", MODELS["same"])
    assert engine.refusal(Mine(), MODELS["same"], state) == "sampler 'threshold' is a class of your own, Mine"


def test_bad_arguments() -> None:
    model = MODELS["same"]
    method, state = start("threshold", model)
    with pytest.raises(ValueError, match="capture=True takes a CUDA device; the model is on cpu"):
        engine.decode(method, model, state)
    with pytest.raises(ValueError, match="poll_every=0 must be an integer of at least 1"):
        engine.decode(method, model, state, capture=False, poll_every=0)
    method.commit(state, method.step(model, state))
    with pytest.raises(ValueError, match="this state has been stepped"):
        engine.decode(method, model, state, capture=False)


def test_generate_takes_compile_on_cuda_alone() -> None:
    model = MODELS["same"]
    with pytest.raises(ValueError, match="compile=True captures CUDA graphs, and the model is on cpu"):
        paradec.generate(model, input_ids=[1, 2], compile=True)
    with pytest.raises(ValueError, match="compile=1 must be True or False"):
        paradec.generate(model, input_ids=[1, 2], compile=1)


@pytest.mark.parametrize(
    ("sampler", "callback", "reason"),
    [("credit", None, "sampler 'credit' keeps something"), ("threshold", print, "a callback looks at every step")],
)
def test_what_cannot_be_captured_falls_back_with_one_warning(sampler: str, callback: object, reason: str) -> None:
    method, state = start(sampler, MODELS["same"])
    with pytest.warns(UserWarning, match=f"compile=True has no effect: {reason}") as caught:
        loop = _device_loop(method, MODELS["same"], state, callback, None)
    assert loop is decode and len(caught) == 1
    method, state = start("threshold", MODELS["same"])
    assert _device_loop(method, MODELS["same"], state, None, None) is not decode


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("sampler", ["threshold", "entropy"])
def test_captured_steps_equal_the_plain_loop(sampler: str, cache: str) -> None:
    for prediction in MODELS:
        model = tiny(2, prediction=prediction)
        model.module.to("cuda")
        arguments = {"input_ids": ROWS, "sampler": sampler, "cache": cache, "max_new_tokens": 12, "block_length": 4}
        plain = paradec.generate(model, **arguments, temperature=0.7, seed=1)
        captured = paradec.generate(model, **arguments, temperature=0.7, seed=1, compile=True)
        assert torch.equal(captured.sequences, plain.sequences) and captured.row_nfe == plain.row_nfe
