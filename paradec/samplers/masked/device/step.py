"""The device-side step: a masked decoding whose decisions are all taken on the accelerator.

The loop of `protocol.decode` waits for the device at every step. Here blocks, counters and ends are tensors of fixed
shapes, and a step is a pure function of them. On CUDA each shape of it is captured in a graph once and replayed.

A row evaluates itself whole (always without a cache; a block's first step with one), or its window. A step is of one
such phase and leaves the rows of the other unchanged. The host reads one small tensor every `poll_every` steps to see
which phase is needed. Graphs are made per phase, number of rows (powers of two) and width of the window. They outlive
their request: a step reads only tensors at fixed addresses, and a `StepLayout`. The model keeps the engines that were
used last, until `clear_graphs`.
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
"""The share of the device's memory that the key/value stores of kept engines may take together."""
MAX_END_IDS = 9
"""For more end ids than this, torch.isin sorts and waits for the device."""


def why_unsupported(sampler: MaskedSampler, model: Any, state: MaskedState) -> str | None:
    """Why the device-side step cannot serve a request, as a clause; None where it can."""
    method = type(sampler)
    if not getattr(method, "device_step", False):  # other families say nothing of it
        if "name" not in vars(method):
            return f"sampler {sampler.name!r} is a class of your own, {method.__name__}"
        return f"sampler {sampler.name!r} keeps something on the host between steps"
    if sampler.memory():
        return f"sampler {sampler.name!r} with these settings remembers something between steps"
    if not state.cache.device_step:
        return f"cache {state.cache.name!r} chooses on the host what to evaluate"
    if model.kind != "decoder" or state.facts.topology != "bidirectional":
        return f"{state.facts.name} is not a bidirectional transformers decoder"
    for feature in state.features.values():
        if feature.host_only is not None:
            return feature.host_only.format(state=state)
    if state.branches > 1:
        return "guidance evaluates two rows for one"
    if not all(isinstance(rule, EndOfText) for rule in state.stop_rules):
        return "stop rules other than the end token are asked on the host"
    if state.request.confidence_eos_eot_inf and len(state.ends) > MAX_END_IDS:
        return f"confidence_eos_eot_inf looks for {len(state.ends)} end tokens, and more than {MAX_END_IDS} are sorted"
    if len({parameter.device for parameter in model.module.parameters()}) > 1:
        return f"{state.facts.name} is spread over several devices"
    return None


def decode(
    sampler: MaskedSampler, model: Any, state: MaskedState, *, capture: bool = True, poll_every: int = 1
) -> MaskedState:
    """Decode a request from its start to its end, as `protocol.decode` does.

    capture: replay CUDA graphs; False runs the same step uncaptured, on any device.
    poll_every: steps between two looks of the host at the device. More than one saves waits, and may replay up to that
        many steps less one for nothing at every block's end.
    Raises ValueError: a request that the device-side step cannot serve or that has begun, or `capture` without a CUDA
    device. Raises FloatingPointError, RuntimeError: as `MaskedSampler.commit`; the row at fault has not been written
    to."""
    check_bool("capture", capture)
    check_int("poll_every", poll_every, low=1)
    if capture and state.canvas.device.type != "cuda":
        raise ValueError(f"capture=True takes a CUDA device; the model is on {state.canvas.device}")
    if reason := why_unsupported(sampler, model, state):
        raise ValueError(f"the device-side step cannot serve this request: {reason}")
    if state.commits or int(state.counts.sum()):
        raise ValueError("the device-side step starts a request from its beginning; this state has been stepped")
    with torch.inference_mode(), torch.cuda.device(state.canvas.device) if capture else nullcontext():
        _decode(sampler, model, state, capture, poll_every)
    return state


def _decode(sampler: MaskedSampler, model: Any, state: MaskedState, capture: bool, poll_every: int) -> None:
    table = block_table(state)
    engine, module = take_engine(model, StepLayout.from_state(sampler, state, table[0], capture))
    engine.load(model, state, table)
    try:
        engine.run(poll_every)
    except NotCapturable:
        raise
    except BaseException:
        engine.write_back(state)
        raise  # and the engine is not kept: its store may hold NaN
    engine.write_back(state)
    return_engine(model, engine, module)


def take_engine(model: Any, layout: StepLayout) -> tuple[DeviceEngine, Any]:
    """Take an engine of a layout from the model, or make one (also for a concurrent request); and its `fingerprint`."""
    module = fingerprint(model)
    for key in [key for key in model.engines if key[1] != module]:  # of weights that are gone
        del model.engines[key]
    return model.engines.pop((layout, module), None) or DeviceEngine(layout), module


def return_engine(model: Any, engine: DeviceEngine, module: Any) -> None:
    """Return an engine to the model; drop the least recently used ones beyond the limits."""
    engine.model = None
    model.engines[engine.layout, module] = engine
    max_bytes = float("inf")
    if engine.device.type == "cuda":
        max_bytes = MAX_STORE_SHARE * torch.cuda.get_device_properties(engine.device).total_memory
    while len(model.engines) > MAX_ENGINES or sum(engine.nbytes for engine in model.engines.values()) > max_bytes:
        del model.engines[next(iter(model.engines))]


def clear_graphs(model: Any) -> int:
    """Free the CUDA graphs that `model` keeps, and their tensors and key/value stores; returns how many sets there
    were.

    Graphs made from other weights (moved, converted, exchanged), or from another attention, are never replayed. Call
    this after other changes, such as a hook on a module or an adapter that is switched off.
    """
    count = len(model.engines)
    model.engines.clear()
    return count


def fingerprint(model: Any) -> tuple[Any, ...]:
    """The addresses of the weights, and the attention, which a captured forward has fixed."""
    module = model.module
    tensors = (*module.parameters(), *module.buffers())
    places = tuple((_place(tensor), tensor.dtype, tensor.shape) for tensor in tensors)
    return id(module), model.attn_implementation, places


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # quantized weights, which are several tensors
        return id(tensor)


def device_loop(
    sampler: Any, model: Any, state: Any, callback: Any, streamer: Any, progress: bool = False
) -> Callable[..., Any]:
    """Choose the loop of a request with `compile`: on the device, or with one warning the plain one."""
    reason = why_unsupported(sampler, model, state)
    observers = {"a callback": callback, "a streamer": streamer, "a trace": state.trace, "a bar": progress or None}
    for name, observer in observers.items():
        if reason is None and observer is not None:
            reason = f"{name} looks at every step"
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
