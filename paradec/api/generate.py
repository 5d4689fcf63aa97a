"""`generate`: decode answers to prompts, with any sampler, cache and block policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.api.defaults import model_defaults
from paradec.api.output import Output, align_logprobs, find_runs
from paradec.api.streaming import check_streamer, request_callback
from paradec.caches.cost import CacheCost
from paradec.constraints.values import token_automaton
from paradec.core.checks import check_model
from paradec.core.prompts import Prompts, align_right, encode
from paradec.core.protocol import TextState, decode, interruptible
from paradec.core.trace import record_token_texts
from paradec.core.weights import weights_lock
from paradec.models.tensor_parallel import TensorParallelModel, fail_together
from paradec.request import Arguments, Preset, Request, warn_of_unused

KINDS = ("text", "canvas", "codes", "masked image")
"""Kinds of model (`paradec.core.checks.MODELS`) that `generate` accepts."""
FAMILIES = ("masked", "draft_verify", "renoising")
"""Families of samplers that `generate` accepts."""
EXTRA_FIELDS = ("encoder_calls", "denoising_calls", "log_weight")
"""Fields of `Output` that are attributes of some states."""


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
        input_ids: another name for `prompt`, as in transformers. Masks in the prompt are filled too (see `infill`);
            other positions are not changed.
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        preset: a `paradec.Request`, or a file that `Request.save` wrote; arguments override its values.
        arguments: fields of `paradec.Request`, which documents them: sampler, cache, steps, temperature, ...

    Returns:
        An `Output`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds the tokens decoded so far.
    """
    check_model("generate", model, KINDS)
    source = choose_source(prompt, input_ids)
    request, sampler = prepare_request(model, arguments, preset)
    return decode_request(model, encode(model, source, attention_mask, request.chat), request, sampler)


def choose_source(prompt: Any, input_ids: Any) -> Any:
    """Return the argument that is not None. Raises ValueError unless exactly one is given."""
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either prompt or input_ids" + ("" if prompt is None else ", not both"))
    return input_ids if prompt is None else prompt


def make_sampler(model: Any, sampler: Any) -> Any:
    """Make a sampler from a name. On models with canvases, a masked sampler becomes the rule of sampler `canvas`."""
    method = samplers.create(sampler) if isinstance(sampler, str) else sampler
    if method.family == "masked" and getattr(model, "makes", None) == "canvas":
        return samplers.create("canvas", rule=method)
    return method


def prepare_request(
    model: Any, arguments: Mapping[str, Any], preset: Preset | None = None, **defaults: Any
) -> tuple[Request, Any]:
    """Make a request and its sampler. Arguments override the preset, which overrides `defaults` and the model's
    defaults. Warns of arguments without effect. Raises: as `generate`."""
    request = Request.from_arguments(arguments, preset, **defaults, **model_defaults(model))
    sampler = make_sampler(model, request.sampler)
    warn_of_unused(request, sampler, arguments)
    return request, sampler


def decode_request(model: Any, prompts: Prompts, request: Request, sampler: Any) -> Output:
    """Run one request on encoded prompts. sampler: from `make_sampler`. Raises: as `generate`."""
    is_parallel = isinstance(model, TensorParallelModel)
    if is_parallel:
        prompts, request = model.share_request(prompts, request)
        sampler = make_sampler(model, request.sampler)
    if sampler.family not in FAMILIES:
        raise ValueError(
            f"sampler {sampler.name!r} is of family {sampler.family!r}; generate takes 'masked', 'draft_verify' and "
            "'renoising'"
        )
    if request.compile and model.device.type != "cuda":
        raise ValueError(
            f"compile=True captures CUDA graphs, and the model is on {model.device}: leave compile out (a CPU launches "
            "no kernels)"
        )
    copies = request.num_return_sequences
    if copies > 1:
        if isinstance(request.seed, tuple) and len(request.seed) == len(prompts.rows):
            request = replace(request, seed=[seed for seed in request.seed for _ in range(copies)])
        prompts = prompts.repeat(copies)
    if request.streamer is not None:
        check_streamer(request.streamer, len(prompts.rows))
    with weights_lock(model), fail_together() if is_parallel else nullcontext():
        state: TextState = sampler.start(model, prompts, request)
        if hint := state.cache_advice():
            warnings.warn(hint, stacklevel=3)
        loop: Callable[..., Any] = decode
        if request.compile:
            from paradec.samplers.masked.device.step import choose_loop

            loop = choose_loop(sampler, model, state, request.callback, request.streamer, request.progress)
        begin = time.perf_counter()

        def output_so_far() -> Output:
            return build_output(model, state, prompts, time.perf_counter() - begin)

        observer: Any = nullcontext(request.callback)
        if request.streamer is not None or request.progress:
            observer = request_callback(state, request.callback, request.streamer, request.progress)
        with interruptible(output_so_far), state.release_stores_on_exit():
            with observer as after_commit:
                loop(sampler, model, state, after_commit)
            prefix = state.kept_prefix(model)
        if state.canvas.is_cuda:
            torch.cuda.synchronize(state.canvas.device)
        output = output_so_far()
    output.prefix = prefix
    if copies > 1 and request.temperature == 0 and _are_copies_equal(output.new_tokens, copies):
        warnings.warn(
            f"temperature=0 gave each prompt num_return_sequences={copies} equal answers; a temperature above 0 draws",
            stacklevel=3,
        )
    if output.cost is not None and (hint := output.cost.advice()):
        warnings.warn(hint, stacklevel=3)
    return output


def _are_copies_equal(tokens: Tensor, copies: int) -> bool:
    return bool((tokens == tokens[::copies].repeat_interleave(copies, 0)).all())


def build_output(model: Any, state: Any, prompts: Prompts, seconds: float) -> Output:
    """Build the output of a state; rows become right-aligned."""
    facts, width, counts = state.facts, int(state.requested_end.max()), state.counts
    ids, is_given = state.canvas.cpu()[:, :width], state.is_prompt.cpu()[:, :width]
    column, length, end = torch.arange(width), _to_column(state.requested_end), _to_column(state.end)
    undecided = state.undecided.cpu()[:, :width]
    filled = ~is_given & (column < length)
    # an end token ends the row only after the prompt and without undecided positions before it
    is_end = torch.isin(ids, torch.tensor(facts.eos_token_ids, dtype=torch.int64))
    is_end &= (column >= _to_column(state.answer_start)) & (column < end) & (undecided.int().cumsum(1) == 0)
    has_end = is_end.any(1, keepdim=True)
    end_column = torch.where(has_end, is_end.int().argmax(1, keepdim=True), width)
    is_answer = filled & ~undecided & (column <= end_column) & (column < end)
    is_text = ~undecided & (column < end_column) & (column < end)  # without the end token
    has_holes = facts.hole_id is not None and any(facts.hole_id in row for row in prompts.rows)
    is_text &= column >= (_to_column(np.array(prompts.starts)) if has_holes else _to_column(state.answer_start))
    text: Any = None
    fills: Any = None
    reasoning: Any = None
    reasoning_tokens, after = None, getattr(state.request.constraint, "after", None)
    if model.tokenizer is not None:
        text = [_decode_ids(model, row[columns]) for row, columns in zip(ids, is_text)]
        if after is not None and not has_holes:
            automaton = token_automaton(state.request.constraint, model.tokenizer, facts.vocab_size, (), ())
            reasoning_tokens = [automaton.free_length(row[columns].tolist()) for row, columns in zip(ids, is_text)]
            free_ids = [row[columns][:count] for row, columns, count in zip(ids, is_text, reasoning_tokens)]
            reasoning = [model.tokenizer.decode(row).removesuffix(after) for row in free_ids]
            text = [full_text[len(_decode_ids(model, row)) :] for full_text, row in zip(text, free_ids)]
        if has_holes:
            fills = [[_decode_ids(model, row[a:b]) for a, b in find_runs(hole)] for row, hole in zip(ids, filled)]
        if prompts.single:
            text, fills, reasoning = text[0], fills and fills[0], reasoning and reasoning[0]
    if state.trace is not None:
        state.trace.ends = np.minimum(state.end, state.requested_end).tolist()
        record_token_texts(state.trace, model.tokenizer)
    sequences = align_right(ids, state.requested_end, facts.fill_token_id).to(state.canvas.device)
    drafting, rollout = getattr(state, "drafting", None), getattr(state, "rollout", None)
    return Output(
        text=text,
        sequences=sequences,
        new_tokens=sequences[:, width - state.max_new_tokens :],
        attention_mask=align_right((column < length).long(), state.requested_end, 0).to(sequences.device),
        filled=align_right(filled, state.requested_end, False).to(sequences.device),
        row_nfe=counts[0].tolist(),
        row_forwards=int(counts[1].sum()),
        forwarded_tokens=int(counts[2].sum()),
        tokens=is_answer.sum(1).tolist(),
        finished=(has_end.squeeze(1) | torch.as_tensor(state.stopped)).tolist(),
        seconds=seconds,
        fills=fills,
        reasoning=reasoning,
        reasoning_tokens=reasoning_tokens,
        recorded_trace=state.trace,
        cost=CacheCost.from_state(state, counts),
        attention=None if state.attention_state is None else state.attention_state.report(),
        **{name: getattr(state, name).tolist() for name in EXTRA_FIELDS if getattr(state, name, None) is not None},
        logprobs=None if state.logprobs is None else align_logprobs(state.logprobs, state.requested_end, is_answer),
        rollout=None if rollout is None else rollout.read(model, state),
        draft_nfe=None if drafting is None else drafting.nfe.tolist(),
    )


def _to_column(array: np.ndarray) -> Tensor:
    """Convert an array [B] to a tensor [B, 1]."""
    return torch.as_tensor(array).unsqueeze(1)


def _decode_ids(model: Any, ids: Tensor) -> str:
    mask = model.facts.mask_token_id
    return model.tokenizer.decode(ids if mask is None else ids[ids != mask], skip_special_tokens=True)
