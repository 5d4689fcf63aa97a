"""Start of a request on canvases: checks, and the state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from paradec.caches.kept_prefix import KeptPrefix
from paradec.core.checks import check_at_most, check_int, short_repr
from paradec.core.facts import HOLE
from paradec.core.logprobs import LogProbs
from paradec.core.memory import Memory
from paradec.core.prompts import encode
from paradec.core.trace import to_spans
from paradec.request import DEFAULTS, Request
from paradec.samplers.features.early_stops import split_stop_rules
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.features.token_controls import TokenControls
from paradec.samplers.masked.blocks import EndOfText
from paradec.samplers.masked.policies import check_steps
from paradec.samplers.renoising import rules
from paradec.samplers.renoising.state import DenoisingState, StabilityRule
from paradec.samplers.start import answer_starts, count_new, make_seeds, make_trace, pad_rows, row_keys, suppressed_ids

_CANVAS = "a canvas has the length that the model was trained with"
UNSUPPORTED = {
    "cache": "keys and values of final tokens are always stored, and those of an open canvas change at every step",
    "share_prefix": "every row encodes its own prompt; prefix=... reuses the keys and values of an earlier request",
    "attention": "sparse attention makes its lists of keys for one block of masks",
    "suffix": "a canvas is evaluated whole, and no position follows it",
    "blocks": _CANVAS,
    "block_length": _CANVAS,
    "temperature": "the temperature falls over the steps: t_max and t_min are settings of the sampler",
    "guidance_scale": "without a mask token there is no unconditional form of the prompt",
    "confidence_eos_eot_inf": "a canvas closes as a whole, so that no token comes after the others",
    "compile": "the host decides when canvases have converged, and then opens and encodes others",
    "rollout": "a canvas closes with its likeliest tokens, which no step has drawn",
}
"""Fields of a request that are not supported on canvases, with the reasons."""
MODEL_SETTINGS = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold")
"""Settings of a sampler for which None is the model's value."""


def start_state(sampler: Any, model: Any, prompt: Any, request: Request, attention_mask: Any) -> DenoisingState:
    """Check a request, and make its state. Raises ValueError or TypeError."""
    sampler.check_model(model)
    for name, why in UNSUPPORTED.items():
        value = getattr(request, name)
        is_set = value != DEFAULTS[name] and value not in ("none" if name == "cache" else "dense", None)
        if is_set and getattr(value, "name", None) != "none":
            raise ValueError(f"{name}={short_repr(value)} does not work with sampler {sampler.name!r}: {why}")
    facts, device = model.facts, model.device
    prompts = encode(model, prompt, attention_mask, request.chat)
    rows = prompts.rows
    has_holes = any(HOLE in row for row in rows)
    num_new = count_new(model, rows, request.max_new_tokens, HOLE, "hole")
    for index, row in enumerate(rows):
        if row[0] == HOLE:
            raise ValueError(
                f"the prompt of row {index} begins with a hole; {facts.name} reads at least one token before a canvas"
            )
    defaults = model.denoising
    rule = rules.check_rule(sampler.rule_for(defaults), sampler.name)
    # only proposals are suppressed; noise may have these ids
    suppressed = suppressed_ids(request, facts, facts.eos_token_ids if request.holes_eos_inf else ())
    check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
    is_reference = request.rng == "reference"
    if is_reference and has_holes:
        raise ValueError("rng='reference' draws as transformers' generate does, which fills no holes: leave rng out")
    # only first tokens: unlike transformers, `make_seeds` rejects rows of unequal lengths
    generator, seeds = make_seeds(request, [row[:1] for row in rows] if is_reference else rows)
    token_rules, early_stops = split_stop_rules(request.stop)
    if early_stops:
        raise ValueError(f"stop={short_repr(request.stop)} ends a row within a block; a canvas closes as a whole")
    stop_rules = [*token_rules]
    answer_start = answer_starts(rows, HOLE)
    if request.stop_strings:
        stop_rules.append(StopStrings.from_request(request, model, answer_start, HOLE))
    images = prompts.images or []
    reuse = _match_prefix(request, model, rows, images)

    width = facts.block_length
    assert width is not None  # models with canvases set it
    lengths = np.array([len(row) for row in rows], np.int64)
    requested_length = lengths + num_new
    starts = [_find_canvas_starts(row, int(end), width) for row, end in zip(rows, requested_length, strict=True)]
    lengths_with_canvases = np.array([row[-1] + width for row in starts], np.int64)
    longest = int(np.maximum(lengths_with_canvases, requested_length).max())
    canvas = pad_rows(rows, longest, HOLE)
    is_prompt = canvas != HOLE
    settings = {name: defaults[name] if (value := getattr(sampler, name)) is None else value for name in MODEL_SETTINGS}
    check_at_most("t_min", settings["t_min"], "t_max", settings["t_max"])
    stability_rule, steps = None, int(settings["max_denoising_steps"])
    if sampler.early_stop:
        stability_rule = StabilityRule(settings["stability_threshold"], settings["confidence_threshold"])
    if request.steps is not None:
        num_canvases = np.array([len(row) for row in starts])
        check_steps(request.steps, num_canvases, "canvases")
        steps = -(-request.steps // int(num_canvases.max()))
    if request.eos_early_stop and facts.eos_token_ids:
        stop_rules.append(EndOfText(list(facts.eos_token_ids), HOLE, np.where(has_holes, answer_start, 0)))
    sizes = {"window": width, "hidden": model.hidden_size}
    state = DenoisingState(
        batch=len(rows),
        memory=Memory.allocate(sampler.memory(), len(rows), sizes, device, model.soft_dtype),
        facts=facts,
        request=request.without_objects(),
        rule=rule,
        steps=steps,
        temperatures=(float(settings["t_min"]), float(settings["t_max"])),
        stability_rule=stability_rule,
        encode_wait=sampler.encode_wait,
        canvas=torch.as_tensor(np.where(is_prompt, canvas, facts.fill_token_id), device=device),
        is_prompt=torch.as_tensor(is_prompt, device=device),
        starts=starts,
        prompt_length=np.array([row[0] for row in starts], np.int64),
        answer_start=answer_start,
        length=lengths_with_canvases,
        requested_end=requested_length,
        max_new_tokens=num_new,
        keys=torch.as_tensor(row_keys(seeds, rows, prompts.copy_indices), device=device),
        generator=generator,
        suppressed=torch.tensor(suppressed, device=device) if suppressed else None,
        ends=torch.tensor(facts.eos_token_ids, dtype=torch.int64, device=device),
        stop_rules=tuple(stop_rules),
        images=images,
        store=model.make_store(len(rows), longest),
    )
    if (controls := TokenControls.from_request(sampler, model, request, in_order=False)) is not None:
        state.features["controls"] = controls
    if request.constraint is not None:
        from paradec.samplers.features.constraints import CanvasConstraint  # few requests need it

        state.features["constraint"] = CanvasConstraint.from_request(model, state, canvas)
    if reuse is not None:
        source, counts = reuse
        state.store.load(request.prefix, source, counts)
        state.encoded, state.reused = counts.copy(), counts
    filled = [to_spans(state.positions_to_fill(row)) for row in range(len(rows))] if request.trace else None
    state.trace = make_trace(sampler, request, state.canvas, lengths_with_canvases, score="probability", filled=filled)
    if request.logprobs is not None:
        state.logprobs = LogProbs.empty(len(rows), longest, request.logprobs, device)
    return state


def _find_canvas_starts(row: list[int], end: int, width: int) -> np.ndarray:
    """Find the canvas starts in a row of length `end`: each at the first position to fill after the previous canvas."""
    holes = [*(position for position, token in enumerate(row) if token == HOLE), *range(len(row), end)]
    starts: list[int] = []
    for position in holes:
        if not starts or position >= starts[-1] + width:
            starts.append(position)
    return np.array(starts, np.int64)


def _match_prefix(
    request: Request, model: Any, rows: list[list[int]], images: list[Any]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the row of the request's prefix that each row reuses, and the number of reused tokens, both [B] int64. Any
    number is exact, since the encoder is causal. Raises ValueError for a prefix of another model, or for images."""
    prefix, has_images = request.prefix, any(image is not None for image in images)
    if request.keep_prefix and has_images:
        raise ValueError("keep_prefix=True keeps only tokens, and the prompt has images: leave it out")
    if prefix is None:
        return None
    if not isinstance(prefix, KeptPrefix):
        raise ValueError(f"prefix={short_repr(prefix)} must be the `prefix` of an output made with keep_prefix=True")
    if has_images:
        raise ValueError("prefix=... is matched by tokens, and the prompt has images: leave it out")
    prefix.check(model, SimpleNamespace(name="canvas", store_dtype=None))  # type: ignore[arg-type]
    source, counts = prefix.match_rows(rows)
    num_leading = [row.index(HOLE) if HOLE in row else len(row) for row in rows]
    counts = np.minimum(counts, num_leading)
    return (source, counts) if counts.any() else None
