"""The device-side step: masked decoding that makes all decisions on the accelerator.

The loop of `protocol.decode` waits for the device at every step. Here blocks, counters and ends are tensors of fixed
shapes, and a step is a pure function of them. On CUDA the step is captured in a graph once per shape, then replayed.

There are two phases. In the phase "full" a row is evaluated whole: without a cache at every step, with a cache in a
block's first step. In the phase "window" only its window is evaluated. A step belongs to a phase and leaves rows in the
other phase unchanged. Every `poll_every` steps the host reads one small tensor to see which phases are needed. Each
combination of phase, number of rows (a power of two) and window width has a graph. Graphs outlive their request, since
a step reads only tensors at fixed addresses and a `StepLayout`. The model keeps the last engines until `clear_graphs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from paradec.core import protocol
from paradec.core.checks import check_bool, check_int
from paradec.samplers.masked.blocks import EndOfText
from paradec.samplers.masked.device.engine import DeviceEngine
from paradec.samplers.masked.device.graphs import NotCapturable, StepLayout, block_table
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.state import MaskedState

MAX_ENGINES = 4
"""Engines that a model keeps between requests."""
MAX_STORE_SHARE = 0.25
"""Maximum share of the device's memory for the key/value stores of these engines together."""
MAX_END_IDS = 9
"""With more end ids than this, torch.isin sorts and waits for the device."""


def why_unsupported(sampler: MaskedSampler, model: Any, state: MaskedState) -> str | None:
    """Return why the device-side step cannot serve a request, as a clause; None if it can."""
    method = type(sampler)
    if not getattr(method, "device_step", False):  # other families lack the attribute
        if "name" not in vars(method):
            return f"sampler {sampler.name!r} is a custom class, {method.__name__}"
        return f"sampler {sampler.name!r} does not support the device-side step"
    if sampler.memory():
        return f"sampler {sampler.name!r} with these settings has a memory between steps"
    if not state.cache.device_step:
        return f"cache {state.cache.name!r} chooses the evaluated positions on the host"
    if model.kind != "decoder" or state.facts.topology != "bidirectional":
        return f"{state.facts.name} is not a bidirectional transformers decoder"
    for feature in state.features.values():
        if feature.why_host_only is not None:
            return feature.why_host_only.format(state=state)
    if state.branches > 1:
        return "guidance evaluates two rows of the model for each row"
    if not all(isinstance(rule, EndOfText) for rule in state.stop_rules):
        return "stop rules other than the end token run on the host"
    if state.request.confidence_eos_eot_inf and len(state.ends) > MAX_END_IDS:
        return f"confidence_eos_eot_inf compares {len(state.ends)} end tokens; at most {MAX_END_IDS} need no sort"
    if len({parameter.device for parameter in model.module.parameters()}) > 1:
        return f"{state.facts.name} is spread over several devices"
    return None


def decode(
    sampler: MaskedSampler, model: Any, state: MaskedState, *, capture: bool = True, poll_every: int = 1
) -> MaskedState:
    """Decode a request from its start to its end, as `protocol.decode` does.

    capture: True replays CUDA graphs; False runs the same step without capture, on any device.
    poll_every: number of steps after which the host reads from the device. More than one saves waits, but may replay up
        to poll_every - 1 useless steps at every block's end.
    Raises ValueError for a request that the device-side step cannot serve, a state that has run steps, or `capture`
    without a CUDA device; NotCapturable; errors of `MaskedSampler.commit`, after the other rows are written."""
    check_bool("capture", capture)
    check_int("poll_every", poll_every, low=1)
    if capture and state.canvas.device.type != "cuda":
        raise ValueError(f"capture=True needs a CUDA device; the model is on {state.canvas.device}")
    if reason := why_unsupported(sampler, model, state):
        raise ValueError(f"the device-side step cannot serve this request: {reason}")
    if state.commits or int(state.counts.sum()):
        raise ValueError("the device-side step needs a new state; this state has already run steps")
    with torch.inference_mode(), torch.cuda.device(state.canvas.device) if capture else nullcontext():
        _decode(sampler, model, state, capture, poll_every)
    return state


def _decode(sampler: MaskedSampler, model: Any, state: MaskedState, capture: bool, poll_every: int) -> None:
    table = block_table(state)
    engine, model_key = take_engine(model, StepLayout.from_state(sampler, state, table[0], capture))
    engine.load(model, state, table)
    try:
        engine.run(poll_every)
    except NotCapturable:
        raise
    except BaseException:
        engine.write_back(state)
        raise  # the engine is dropped: its store may contain NaN
    engine.write_back(state)
    return_engine(model, engine, model_key)


def take_engine(model: Any, layout: StepLayout) -> tuple[DeviceEngine, Any]:
    """Take an engine with this layout from the model, or make one; also return the model's `fingerprint`. A concurrent
    request does not find the taken engine, and makes another."""
    model_key = fingerprint(model)
    for key in [key for key in model.engines if key[1] != model_key]:  # their weights were replaced
        del model.engines[key]
    return model.engines.pop((layout, model_key), None) or DeviceEngine(layout), model_key


def return_engine(model: Any, engine: DeviceEngine, model_key: Any) -> None:
    """Return an engine to the model; drop the least recently used engines beyond the limits."""
    engine.model = None
    model.engines[engine.layout, model_key] = engine
    max_bytes = float("inf")
    if engine.device.type == "cuda":
        max_bytes = MAX_STORE_SHARE * torch.cuda.get_device_properties(engine.device).total_memory
    while len(model.engines) > MAX_ENGINES or sum(engine.nbytes for engine in model.engines.values()) > max_bytes:
        del model.engines[next(iter(model.engines))]


def clear_graphs(model: Any) -> int:
    """Free the CUDA graphs of `model`, their tensors and key/value stores; returns the number of freed engines.

    Graphs are never replayed after weights were moved, converted or exchanged, or with another attention. After other
    changes, such as a hook on a module or an adapter that is switched off, call this function.
    """
    count = len(model.engines)
    model.engines.clear()
    return count


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Return the values that are fixed in a captured forward: the weights' addresses, and the attention."""
    module = model.module
    tensors = (*module.parameters(), *module.buffers())
    addresses = tuple((_read_address(tensor), tensor.dtype, tensor.shape) for tensor in tensors)
    return id(module), model.attn_implementation, addresses


def _read_address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # quantized weights, which are several tensors
        return id(tensor)


def choose_loop(
    sampler: Any, model: Any, state: Any, callback: Any, streamer: Any, progress: bool = False
) -> Callable[..., Any]:
    """Choose the loop of a request with `compile=True`: `decode`, or `protocol.decode` with one warning."""
    reason = why_unsupported(sampler, model, state)
    observers = {"a callback": callback, "a streamer": streamer, "a trace": state.trace, "a bar": progress or None}
    for name, observer in observers.items():
        if reason is None and observer is not None:
            reason = f"{name} reads every step"
    if reason is not None:
        warnings.warn(f"compile=True has no effect: {reason}", stacklevel=4)
        return protocol.decode

    def decode_on_device(sampler: Any, model: Any, state: Any, after_commit: Any) -> None:
        try:
            decode(sampler, model, state)
        except NotCapturable as error:
            warnings.warn(f"compile=True has no effect: {error}", stacklevel=5)
            protocol.decode(sampler, model, state, after_commit)

    return decode_on_device
