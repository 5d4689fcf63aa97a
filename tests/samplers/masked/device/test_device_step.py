"""The device-side step: equality with the plain loop, capture as a CUDA graph, and unsupported requests."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracles.masked import decode_by_hand
from small_models import END, MASK, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import paradec
from paradec import samplers
from paradec.core.protocol import decode
from paradec.models.adapter import Model
from paradec.samplers.masked.device import engine as device_engine
from paradec.samplers.masked.device import graphs as device_graphs
from paradec.samplers.masked.device import step as device_step
from paradec.samplers.masked.state import MaskedState

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14]]
PROMPTS_WITH_MASKS = [[1, MASK, 3, MASK, MASK, 6, 7, 8, 9, MASK, 11], [5, 6, MASK, 8]]
MANY_DRAWS = {"prompt": [[1 + row % 40] for row in range(100)], "max_new_tokens": 100, "block_length": 20, "steps": 50}
"""A request that draws 10,000 tokens."""
SAMPLERS = [name for name in samplers.names() if getattr(samplers.get(name), "device_step", False)]
MODELS = {prediction: tiny(2, prediction=prediction) for prediction in ("same", "shifted")}


@pytest.fixture(autouse=True)
def short_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad to multiples of 16 positions, to save time."""
    monkeypatch.setattr(device_graphs, "COLUMN_MULTIPLE", 16)
    monkeypatch.setattr(device_engine, "WIDTH_MULTIPLE", 16)


def start(sampler: str, model: Model, prompt: list[list[int]] = ROWS, **request) -> tuple[object, MaskedState]:
    method = samplers.create(sampler, **request.pop("settings", {}))
    request = {"max_new_tokens": 12, "block_length": 4, "seed": 1} | request
    return method, method.start(model, prompt, **request)


def assert_same(model: Model, sampler: str, *, poll_every: int = 1, capture: bool = False, **request) -> MaskedState:
    """Assert that the device-side step and the plain loop give the same final state, and return that state."""
    method, plain = start(sampler, model, **request)
    decode(method, model, plain)
    method, ours = start(sampler, model, **request)
    if capture:
        with torch.inference_mode():
            device_step._decode(method, model, ours, True, poll_every)
    else:
        device_step.decode(method, model, ours, capture=False, poll_every=poll_every)
    assert torch.equal(ours.canvas, plain.canvas)
    np.testing.assert_array_equal(ours.counts, plain.counts)
    for name in ("end", "stopped", "running", "decided", "row_step"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name), err_msg=name)
    assert ours.done and ours.progress == plain.progress
    return ours


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("sampler", "prediction", "cache"),
    [(name, *pair) for name in SAMPLERS for pair in (("same", "none"), ("shifted", "dual"))]
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
        ("threshold", {"settings": {"threshold": 0.3, "quota_per_step": "least"}, "steps": 6, "cache": "prefix"}),
        ("factor", {"logits_eos_inf": True, "suppress_tokens": (3, 4), "temperature": 0.7, "cache": "prefix"}),
        ("random", {"steps": 9, "block_length": 5}),  # three blocks, the last one shorter
        pytest.param("low_confidence", MANY_DRAWS | {"temperature": 0.7}, marks=pytest.mark.full),
        pytest.param("random", MANY_DRAWS | {"temperature": 1.0, "top_p": 0.9}, marks=pytest.mark.full),
    ],
)
def test_same_state_with_other_settings(sampler: str, request_: dict) -> None:
    assert_same(MODELS["same"], sampler, **request_)


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("block_length", [None, 3])
def test_same_state_with_masks_in_the_prompt(block_length: int | None, cache: str) -> None:
    request = {"prompt": PROMPTS_WITH_MASKS, "max_new_tokens": None, "block_length": block_length, "cache": cache}
    assert_same(MODELS["shifted"], "threshold", **request)


@pytest.mark.parametrize("eos_early_stop", [False, True])
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_same_state_if_masks_in_the_prompt_cannot_become_end_tokens(cache: str, eos_early_stop: bool) -> None:
    ends = tuple(range(1, 41, 2))
    request = {"prompt": PROMPTS_WITH_MASKS, "max_new_tokens": 8, "cache": cache, "temperature": 1.0}
    request["eos_early_stop"] = eos_early_stop
    state = assert_same(tiny(2, seed=3, ends=ends), "threshold", holes_eos_inf=True, **request)
    in_prompt = (np.arange(state.canvas.shape[1]) < state.answer_start[:, None]) & ~state.is_prompt.numpy()
    assert in_prompt.any() and not np.isin(state.canvas.numpy()[in_prompt], ends).any()
    unrestricted = assert_same(tiny(2, seed=3, ends=ends), "threshold", **request)
    assert np.isin(unrestricted.canvas.numpy()[in_prompt], ends).any()


@pytest.mark.parametrize(("cache", "poll_every"), [("none", 5), ("prefix", 3)])
def test_steps_after_the_end_change_neither_tokens_nor_counts(cache: str, poll_every: int) -> None:
    assert_same(MODELS["same"], "threshold", cache=cache, poll_every=poll_every, settings={"threshold": 0.3})


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_rows_end_at_their_end_token(cache: str) -> None:
    # six end ids in a vocabulary of 41: rows end at different steps, inside and between blocks
    model = tiny(2, seed=3, ends=(END, 7, 21, 30, 12, 2))
    rows = [[i, i + 1, i + 5] for i in range(8, 20)]
    state = assert_same(model, "threshold", prompt=rows, cache=cache, max_new_tokens=16)
    assert 0 < state.stopped.sum() < len(rows) and len(set(state.end.tolist())) > 3


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize(
    ("sampler", "steps"), [("threshold", None), ("factor", None), ("low_confidence", 4), ("maskgit_plus", 12)]
)
def test_both_loops_equal_the_oracle(sampler: str, steps: int | None, cache: str) -> None:
    prediction = "shifted" if (sampler == "factor") == (cache == "prefix") else "same"
    model = tiny(2, prediction=prediction, seed=3, ends=(END, 7, 21, 30))
    rows = [[i, *range(i + 1, i + 1 + i % 3)] for i in range(8, 22)]
    settings = {"threshold": {"threshold": 0.3}, "factor": {"factor": 2.0}}.get(sampler, {})
    expected = [decode_by_hand(model, row, sampler, cache, 6, 4, None if steps is None else steps // 2) for row in rows]
    for loop in (decode, partial(device_step.decode, capture=False)):
        method, state = start(
            sampler, model, prompt=rows, settings=settings, cache=cache, max_new_tokens=6, block_length=4, steps=steps
        )
        loop(method, model, state)
        for index, reference in enumerate(expected):
            assert state.canvas[index, : state.end[index]].tolist() == reference["row"]
            for name in ("end", "stopped", "row_step", "decided"):
                assert getattr(state, name)[index] == reference[name], (name, index)
            steps_taken, forwards, evaluated, full_forwards = state.counts[:, index]
            assert steps_taken == forwards == reference["row_step"]
            assert evaluated == reference["evaluated"] and full_forwards == reference["full_forwards"]
    ends = [(reference["stopped"], reference["end"] - len(row)) for reference, row in zip(expected, rows, strict=True)]
    assert {stopped for stopped, _ in ends} == {False, True}


OTHER_ROWS = [[9, 8], [3] * 12, [20, 21, 22, 23, 24, 25, 26]]
FULL_ROWS = [[list(range(first, first + 8)) for first in firsts] for firsts in ((1, 2), (11, 7))]
"""Two batches of prompts of 8 tokens: with 24 new tokens each row fills 32 columns without padding."""


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_requests_reuse_the_tensors_of_the_last_one(cache: str) -> None:
    model = tiny(2, prediction="shifted")
    request = {"cache": cache, "temperature": 0.6}
    assert_same(model, "threshold", **request)
    ((key, first_engine),) = model.engines.items()
    assert_same(model, "threshold", prompt=OTHER_ROWS, seed=7, **request)
    assert list(model.engines.items()) == [(key, first_engine)] and first_engine.model is None
    assert_same(model, "threshold", prompt=OTHER_ROWS, cache=cache, temperature=0.3)
    assert len(model.engines) == 2 and key[0].request.temperature == 0.6
    method, state = start("threshold", model, **request)
    in_use = model.engines.pop(key)  # as if another request were using it
    device_step.decode(method, model, state, capture=False)
    assert model.engines[key] is not in_use
    assert device_step.clear_graphs(model) == 2 and not model.engines
    assert_same(model, "threshold", **request)


def test_engines_of_old_weights_are_deleted_and_the_number_of_engines_is_limited() -> None:
    model = tiny(1)
    for length in range(3, 4 + device_step.MAX_ENGINES):
        assert_same(model, "threshold", prompt=ROWS[:1], max_new_tokens=8, block_length=length)
    assert len(model.engines) == device_step.MAX_ENGINES
    model.module.float().double()  # weights with new addresses
    assert_same(model, "threshold", prompt=ROWS[:1], max_new_tokens=8, block_length=3)
    assert len(model.engines) == 1


def test_a_module_in_training_mode_is_refused() -> None:
    """A captured forward would repeat the dropout of its first request."""
    model = tiny(1)
    expected, keys = assert_same(model, "threshold").canvas, list(model.engines)
    model.module.train()
    with pytest.raises(RuntimeError, match="training mode"):
        assert_same(model, "threshold")
    model.module.eval()
    assert torch.equal(assert_same(model, "threshold").canvas, expected)
    assert list(model.engines) == keys


def test_an_engine_is_deleted_after_nan_logits() -> None:
    model = tiny(1)
    with torch.no_grad():
        model.module.model.embed_tokens.weight[14] = torch.nan
    method, state = start("threshold", model, cache="dual")
    with pytest.raises(FloatingPointError):
        device_step.decode(method, model, state, capture=False)
    assert not model.engines
    assert_same(model, "threshold", prompt=[[1], [2, 3], [4]], cache="dual")


class Tape(TorchDispatchMode):
    """Record operations with their arguments, to play them again. Like a CUDA graph, it fixes numbers and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        replaced: dict[int, Tensor] = {}

        def replace_tensor(tensor: Tensor) -> Tensor:
            return replaced.get(id(tensor), tensor)

        for function, args, kwargs, recorded_result in self.calls:
            args, kwargs = tree_map_only(Tensor, replace_tensor, (args, kwargs))
            result = function(*args, **kwargs)
            pairs = zip(tree_leaves(recorded_result), tree_leaves(result), strict=True)
            replaced |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("sampler", "request_", "prompts"),
    [
        ("threshold", {"cache": "dual", "temperature": 0.5}, (ROWS, OTHER_ROWS, ROWS)),
        ("low_confidence", {"cache": "prefix", "steps": 6}, (ROWS, OTHER_ROWS)),
        ("entropy", {"cache": "none", "settings": {"alg_temp": 0.4}, "temperature": 0.5}, (ROWS, OTHER_ROWS)),
        ("random", {"cache": "dual", "max_new_tokens": 24, "block_length": 8, "steps": 9}, FULL_ROWS),
        ("factor", {"cache": "none", "max_new_tokens": 24, "block_length": 8}, FULL_ROWS),
    ],
)
def test_replayed_operations_equal_the_plain_loop(sampler: str, request_: dict, prompts: Any, monkeypatch: Any) -> None:
    model, tapes = tiny(2, prediction="shifted"), []

    def record_step(device: device_step.DeviceEngine, step: Any) -> Any:
        assert not device.live
        step()  # the first call allocates tensors
        with Tape() as tape:
            step()
        tapes.append(tape)
        return tape.play

    monkeypatch.setattr(device_engine, "capture_graph", record_step)
    # on the CPU some operations use NumPy, which a tape cannot record
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda tensor: False))
    known_phases = set()
    for number, prompt in enumerate(prompts):
        assert_same(model, sampler, capture=True, prompt=prompt, seed=number, **request_)
        (device,) = model.engines.values()
        assert len(tapes) == len(device.graphs)
        if number:  # phases of the first request are not captured again
            assert known_phases & set(device.graphs) and len(tapes) < 2 * len(known_phases) + number
        known_phases |= set(device.graphs)
    assert device.layout.rows_fill_canvas == (prompts is FULL_ROWS)


def test_nan_logits_raise_an_error_that_names_the_row_and_leave_its_masks() -> None:
    model = tiny(1)
    with torch.no_grad():  # only row 2 contains token 14
        model.module.model.embed_tokens.weight[14] = torch.nan
    for run in (
        lambda method, state: decode(method, model, state),
        lambda method, state: device_step.decode(method, model, state, capture=False),
    ):
        method, state = start("threshold", model)
        with pytest.raises(FloatingPointError, match="row 2 at its step 0"):
            run(method, state)
        assert state.canvas[2, 1:13].eq(MASK).all()


@pytest.mark.parametrize(
    ("sampler", "request_", "reason"),
    [
        ("credit", {}, "sampler 'credit' does not support the device-side step"),
        ("random", {"settings": {"order": "block"}}, "'random' with these settings has a memory"),
        ("threshold", {"settings": {"quota_per_step": "carry"}, "steps": 3}, "'threshold' with these settings"),
        ("threshold", {"cache": "dkv_decode"}, "cache 'dkv_decode' chooses the evaluated positions"),
        ("threshold", {"guidance_scale": 2.0}, "guidance evaluates two rows"),
        ("threshold", {"rng": "reference", "prompt": [[1, 2]]}, "rng='reference' draws on the host"),
        ("threshold", {"stop": paradec.Prophet(answer=range(2))}, "stop rules other than the end token"),
    ],
)
def test_unsupported_requests_are_refused_with_the_reason(sampler: str, request_: dict, reason: str) -> None:
    model = MODELS["same"]
    method, state = start(sampler, model, **request_)
    assert reason in device_step.why_unsupported(method, model, state)
    with pytest.raises(ValueError, match="device-side step cannot serve this request"):
        device_step.decode(method, model, state, capture=False)


def test_custom_subclasses_are_not_supported() -> None:
    class Custom(samplers.get("threshold")):
        pass

    _, state = start("threshold", MODELS["same"])
    assert (
        device_step.why_unsupported(Custom(), MODELS["same"], state) == "sampler 'threshold' is a custom class, Custom"
    )


@pytest.mark.parametrize(
    ("sampler", "callback", "reason"),
    [("credit", None, "sampler 'credit' does not support"), ("threshold", print, "a callback reads every step")],
)
def test_unsupported_requests_fall_back_with_one_warning(sampler: str, callback: object, reason: str) -> None:
    method, state = start(sampler, MODELS["same"])
    with pytest.warns(UserWarning, match=f"compile=True has no effect: {reason}") as caught:
        loop = device_step.choose_loop(method, MODELS["same"], state, callback, None)
    assert loop is decode and len(caught) == 1
    method, state = start("threshold", MODELS["same"])
    assert device_step.choose_loop(method, MODELS["same"], state, None, None) is not decode


def test_a_step_that_cannot_be_captured_runs_in_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(1)
    captured_steps = []

    def capture_only_once(device: device_step.DeviceEngine, step: Any) -> Any:
        if captured_steps:
            raise device_step.NotCapturable("a step of LlamaForCausalLM cannot be captured: it waits")
        captured_steps.append(step)
        return step

    monkeypatch.setattr(device_engine, "capture_graph", capture_only_once)
    monkeypatch.setattr(
        device_step, "decode", lambda method, model, state: device_step._decode(method, model, state, True, 1)
    )
    method, plain = start("threshold", model, cache="dual")
    decode(method, model, plain)
    method, state = start("threshold", model, cache="dual")
    with torch.inference_mode(), pytest.warns(UserWarning, match="no effect: a step .* it waits") as caught:
        device_step.choose_loop(method, model, state, None, None)(method, model, state, None)
    assert len(caught) == 1 and not model.engines
    assert torch.equal(state.canvas, plain.canvas) and (state.counts == plain.counts).all()


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
        for _ in range(2):  # capture, then reuse the graphs
            captured = paradec.generate(model, **arguments, temperature=0.7, seed=1, compile=True)
            assert torch.equal(captured.sequences, plain.sequences) and captured.row_nfe == plain.row_nfe
        assert device_step.clear_graphs(model) == 1
