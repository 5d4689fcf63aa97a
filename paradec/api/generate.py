"""`generate`: from a prompt to text, with any sampler, cache and block policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.api.output import Output, aligned, runs
from paradec.api.streaming import bar, check_streamer, stream
from paradec.caches.cost import CacheCost
from paradec.core.checks import check_model
from paradec.core.contract import TextState
from paradec.core.prompts import Prompts, encode, right_aligned
from paradec.core.protocol import Interrupted, decode
from paradec.core.trace import name_tokens
from paradec.models.requests import UNSHARED
from paradec.models.tensor_parallel import TensorParallelModel, failing_together
from paradec.request import FIELDS, Arguments, Preset, Request, warn_of_unused

MADE = ("text", "canvas", "codes", "masked image")
"""Kinds of model (`paradec.core.checks.MODELS`) that write ids without being told where a picture ends."""
COUNTED = ("encoder_calls", "denoising_calls", "log_weight")
"""What some states count besides."""


def generate(
    model: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    preset: Preset | None = None,
    **arguments: Unpack[Arguments],
) -> Output:
    """Decode answers to one prompt or a batch of prompts of any lengths.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: a text, a chat (list of {"role", "content"}), input ids, or a list of one of these kinds; or the
            result of a tokenizer or its `apply_chat_template`.
        input_ids: the same as `prompt`, under transformers' name. Positions that hold the mask id are filled too;
            all others are not changed (see `infill`).
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        preset: a `paradec.Request`, or a file that `Request.save` wrote; arguments override its values.
        arguments: fields of `paradec.Request`, which documents them: sampler, cache, steps, temperature, ...

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): on Ctrl-C; its `output` holds what was decoded.
    """
    check_model("generate", model, MADE)
    check_source(prompt, input_ids)
    request = Request.of(arguments, preset, **own_defaults(model))
    prompts = encode(model, prompt if input_ids is None else input_ids, attention_mask, request.chat)
    return answer(model, prompts, request, arguments)


def answer(model: Any, prompts: Prompts, request: Request, said: Collection[str] = FIELDS) -> Output:
    """Decode a request for encoded prompts: what all entry points of text come to. As `generate`.

    Args:
        said: the fields of the request that the caller gave, of which a warning may speak.

    Raises: as `generate`.
    """
    if isinstance(model, TensorParallelModel):
        prompts, request = model.share_request(prompts, request)
    method: Any = samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler
    if method.family not in ("masked", "draft_verify", "renoising"):
        raise ValueError(
            f"sampler {method.name!r} is of family {method.family!r}; generate takes 'masked', 'draft_verify' and "
            "'renoising'"
        )
    method = sampler_on(model, method)
    warn_of_unused(request, method, said)
    if request.compile and model.device.type != "cuda":
        raise ValueError(
            f"compile=True captures CUDA graphs, and the model is on {model.device}: leave compile out (a CPU has no "
            "launches to save)"
        )
    callback, copies = request.callback, request.num_return_sequences
    if copies > 1:
        if isinstance(request.seed, tuple) and len(request.seed) == len(prompts.rows):
            request = replace(request, seed=[entry for entry in request.seed for _ in range(copies)])
        prompts = prompts.repeated(copies)
    if request.streamer is not None:
        check_streamer(request.streamer, len(prompts.rows))
    together = failing_together() if isinstance(model, TensorParallelModel) else nullcontext()
    with getattr(model, "requests", UNSHARED).slot.lock, together:
        state: TextState = method.start(model, prompts, request)
        if hint := state.cache_advice():
            warnings.warn(hint, stacklevel=3)
        loop: Callable[..., Any] = decode
        if request.compile:
            loop = device_loop(method, model, state, callback, request.streamer, request.progress)
        begin = time.perf_counter()
        watched = nullcontext(callback) if request.streamer is None else stream(request.streamer, state, callback)
        try:
            with state.freed_store(), watched as watcher:
                with bar(state, watcher) if request.progress else nullcontext(watcher) as after_commit:
                    loop(method, model, state, after_commit)
                kept = state.kept_prefix(model)
        except KeyboardInterrupt as interrupt:
            stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
            stopped.output = output_of(model, state, prompts, time.perf_counter() - begin)
            raise stopped from interrupt
        if state.canvas.is_cuda:
            torch.cuda.synchronize(state.canvas.device)
        output = output_of(model, state, prompts, time.perf_counter() - begin)
    output.prefix = kept
    if output.cost is not None and (hint := output.cost.advice()):
        warnings.warn(hint, stacklevel=3)
    return output


def device_loop(
    method: Any, model: Any, state: Any, callback: Any, streamer: Any, progress: bool = False
) -> Callable[..., Any]:
    """The loop of a request with `compile`: on the device, or with one warning the plain one."""
    from paradec.samplers.masked.device import step as device_step

    reason = device_step.refusal(method, model, state)
    looking = {"a callback": callback, "a streamer": streamer, "a trace": state.trace, "a bar": progress or None}
    for name, given in looking.items():
        if reason is None and given is not None:
            reason = f"{name} looks at every step"
    if reason is not None:
        warnings.warn(f"compile=True has no effect: {reason}", stacklevel=4)
        return decode

    def on_the_device(method: Any, model: Any, state: Any, after_commit: Any) -> None:
        try:
            device_step.decode(method, model, state)
        except device_step.NotCapturable as error:
            warnings.warn(f"compile=True has no effect: {error}", stacklevel=5)
            decode(method, model, state, after_commit)

    return on_the_device


def sampler_on(model: Any, method: Any) -> Any:
    """The sampler that decodes with a model where this one is named: on canvases a masked one says what is kept."""
    if method.family == "masked" and getattr(model, "makes", None) == "canvas":
        return samplers.create("canvas", rule=method)
    return method


def own_defaults(model: Any) -> dict[str, Any]:
    """What requests for this model begin from, where that is not the default of `paradec.Request`."""
    sampler = getattr(model, "default_sampler", None)
    return {} if sampler is None else {"sampler": sampler}


def check_source(prompt: Any, input_ids: Any) -> None:
    """Raise ValueError unless exactly one is given."""
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either prompt or input_ids" + ("" if prompt is None else ", not both"))


def output_of(model: Any, state: TextState, prompts: Prompts, seconds: float) -> Output:
    """Read the canvas of a state: rows that start at 0 become rows that end at the same column, padded on the left."""
    facts, width = state.facts, int(state.asked.max())
    ids, given = state.canvas.cpu()[:, :width], state.given.cpu()[:, :width]
    column, length, end = torch.arange(width), _column(state.asked), _column(state.end)
    undecided = state.undecided.cpu()[:, :width]
    filled = ~given & (column < length)
    # an end token counts after everything given, and when nothing before it is undecided
    is_end = torch.isin(ids, torch.tensor(facts.eos_token_ids, dtype=torch.int64))
    is_end &= (column >= _column(state.answer_start)) & (column < end) & (undecided.int().cumsum(1) == 0)
    ended = is_end.any(1, keepdim=True)
    last = torch.where(ended, is_end.int().argmax(1, keepdim=True), width)
    counted = filled & ~undecided & (column <= last) & (column < end)
    read = ~undecided & (column < last) & (column < end)  # the end token itself is no text
    holes = facts.hole_id is not None and any(facts.hole_id in row for row in prompts.rows)
    begin = _column(np.array(prompts.starts)) if holes else _column(state.answer_start)
    text: Any = None
    fills: Any = None
    if model.tokenizer is not None:
        text = [_decoded(model, row[wanted]) for row, wanted in zip(ids, read & (column >= begin))]
        if holes:
            fills = [[_decoded(model, row[a:b]) for a, b in runs(hole)] for row, hole in zip(ids, filled)]
    if state.trace is not None:
        state.trace.ends = np.minimum(state.end, state.asked).tolist()
        name_tokens(state.trace, model.tokenizer)
    sequences = right_aligned(ids, state.asked, facts.fill_token_id).to(state.canvas.device)
    drafting, recorded = getattr(state, "drafting", None), getattr(state, "rollout", None)
    return Output(
        text=text[0] if text and prompts.single else text,
        sequences=sequences,
        new_tokens=sequences[:, width - state.max_new_tokens :],
        attention_mask=right_aligned((column < length).long(), state.asked, 0).to(sequences.device),
        filled=right_aligned(filled, state.asked, False).to(sequences.device),
        row_nfe=state.nfe.tolist(),
        row_forwards=int(state.row_forwards.sum()),
        forwarded_tokens=int(state.forwarded_tokens.sum()),
        tokens=counted.sum(1).tolist(),
        finished=(ended.squeeze(1) | torch.as_tensor(state.stopped)).tolist(),
        seconds=seconds,
        fills=fills[0] if fills and prompts.single else fills,
        trace=state.trace,
        cost=CacheCost.of(state),
        attention=None if state.attention_state is None else state.attention_state.report(),
        **{name: getattr(state, name).tolist() for name in COUNTED if hasattr(state, name)},
        logprobs=None if state.logprobs is None else aligned(state.logprobs, state.asked, counted),
        rollout=None if recorded is None else recorded.read(model, state),
        draft_nfe=None if drafting is None else drafting.nfe.tolist(),
    )


def _column(array: np.ndarray) -> Tensor:
    """[B] on the host -> [B, 1]."""
    return torch.as_tensor(array).unsqueeze(1)


def _decoded(model: Any, ids: Tensor) -> str:
    mask = model.facts.mask_token_id
    return model.tokenizer.decode(ids if mask is None else ids[ids != mask], skip_special_tokens=True)
