"""The start of a decoding of canvases: a request meets a model, and becomes a state."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from paradec.caches.kept import KeptPrefix
from paradec.core.checks import check_int, shown
from paradec.core.facts import HOLE
from paradec.core.logprobs import LogProbs
from paradec.core.memory import Memory
from paradec.core.prompts import encode
from paradec.core.trace import to_spans
from paradec.request import DEFAULTS, Request
from paradec.samplers.features.early_stops import split_stop_rules
from paradec.samplers.features.stop_strings import StopStrings
from paradec.samplers.masked.blocks import EndOfText, StopRule
from paradec.samplers.renoising import rules
from paradec.samplers.renoising.state import DenoisingState, Settled
from paradec.samplers.start import answer_starts, make_trace, new_tokens, padded, randomness, row_keys, suppressed_ids

_CANVAS = "a canvas has the length that the model was trained with"
REFUSED = {
    "cache": "keys and values of final tokens are always kept, and those of an open canvas change at every step",
    "share_prefix": "every row encodes its own prompt; prefix=... takes over what an earlier request encoded",
    "attention": "sparse attention makes its lists of keys for one block of masks",
    "suffix": "a canvas is evaluated whole, and nothing comes after it",
    "blocks": _CANVAS,
    "block_length": _CANVAS,
    "temperature": "the temperature falls over the steps: t_max and t_min are settings of the sampler",
    "guidance_scale": "without a mask token there is no unconditional form of the prompt",
    "confidence_eos_eot_inf": "a canvas closes as a whole, so that no token comes after the others",
    "compile": "the host decides when canvases have settled, and then opens and encodes others",
    "rollout": "a canvas closes with its likeliest tokens, which no step has drawn",
}
"""Fields of a request that mean nothing on canvases, and why."""


def start_state(sampler: Any, model: Any, prompt: Any, request: Request, attention_mask: Any) -> DenoisingState:
    """Check all arguments, then lay out the rows: each prompt from position 0, canvases after it, or over the holes in
    it.

    Raises:
        ValueError, TypeError: an argument that does not fit the model, the sampler or the prompts.
    """
    sampler.check_model(model)
    _check_unsupported(sampler, request)
    facts, device = model.facts, model.device
    prompts = encode(model, prompt, attention_mask, request.chat)
    rows = prompts.rows
    holes = any(HOLE in row for row in rows)
    num_new = new_tokens(model, rows, request.max_new_tokens, HOLE, "hole")
    for index, row in enumerate(rows):
        if row[0] == HOLE:
            raise ValueError(
                f"the prompt of row {index} begins with a hole; {facts.name} reads at least one token before a canvas"
            )
    defaults = model.denoising
    rule = rules.checked(sampler.rule_for(defaults), sampler.name)
    suppressed = suppressed_ids(request, facts)  # noise may hold them
    if len({*suppressed, *(facts.eos_token_ids if request.holes_eos_inf else ())}) >= facts.vocab_size:
        raise ValueError(f"suppress_tokens excludes all {facts.vocab_size} tokens of the vocabulary")
    check_int("logprobs", request.logprobs, low=0, high=facts.vocab_size, none=True)
    generator, seeds = _randomness(request, rows, holes)
    stop_rules = _stop_rules(sampler, request)
    answers = answer_starts(rows, HOLE)
    if request.stop_strings:
        stop_rules.append(StopStrings.from_request(request, model, answers, HOLE))
    images = prompts.images or []
    reuse = _reuse(request, model, rows, images)

    width = facts.block_length
    assert width is not None  # what models with canvases state
    lengths = np.array([len(row) for row in rows], np.int64)
    requested_length = lengths + num_new
    starts = [_starts(row, int(end), width) for row, end in zip(rows, requested_length, strict=True)]
    lengths_with_canvases = np.array([row[-1] + width for row in starts], np.int64)
    longest = int(np.maximum(lengths_with_canvases, requested_length).max())
    canvas = padded(rows, longest, HOLE)
    is_given = canvas != HOLE
    if request.eos_early_stop and facts.eos_token_ids:
        stop_rules.append(EndOfText(list(facts.eos_token_ids), HOLE, answers if holes else np.zeros_like(answers)))
    sizes = {"window": width, "hidden": model.hidden_size}
    state = DenoisingState(
        batch=len(rows),
        memory=Memory.allocate(sampler.memory(), len(rows), sizes, device, model.soft_dtype),
        facts=facts,
        request=request.without_objects(),
        rule=rule,
        steps=_steps(sampler, request, defaults, starts),
        temperatures=_temperatures(sampler, defaults),
        settled=_settled(sampler, defaults),
        encode_wait=sampler.encode_wait,
        canvas=torch.as_tensor(np.where(is_given, canvas, facts.fill_token_id), device=device),
        given=torch.as_tensor(is_given, device=device),
        starts=starts,
        prompt_length=np.array([row[0] for row in starts], np.int64),
        answer_start=answers,
        length=lengths_with_canvases,
        asked=requested_length,
        max_new_tokens=num_new,
        keys=torch.as_tensor(row_keys(seeds, rows, prompts.copy_indices), device=device),
        generator=generator,
        suppressed=torch.tensor(suppressed, device=device) if suppressed else None,
        ends=torch.tensor(facts.eos_token_ids, dtype=torch.int64, device=device),
        stop_rules=tuple(stop_rules),
        images=images,
        store=model.make_store(len(rows), longest),
    )
    if request.constraint is not None:
        from paradec.samplers.features.constraints import CanvasConstraint  # for few requests

        state.features["constraint"] = CanvasConstraint.from_request(model, state, canvas)
    if reuse is not None:
        source, counts = reuse
        state.store.load(request.prefix, source, counts)
        state.encoded, state.reused = counts.copy(), counts
    filled = [to_spans(state.to_fill(row)) for row in range(len(rows))] if request.trace else None
    state.trace = make_trace(sampler, request, state.canvas, lengths_with_canvases, score="probability", filled=filled)
    if request.logprobs is not None:
        state.logprobs = LogProbs.empty(len(rows), longest, request.logprobs, device)
    return state


def _check_unsupported(sampler: Any, request: Request) -> None:
    """Raise ValueError for a field that means nothing here, with the reason."""
    for name, why in REFUSED.items():
        value = getattr(request, name)
        is_set = value != DEFAULTS[name] and value not in ("none" if name == "cache" else "dense", None)
        if is_set and getattr(value, "name", None) != "none":
            raise ValueError(f"{name}={shown(value)} does not work with sampler {sampler.name!r}: {why}")


def _stop_rules(sampler: Any, request: Request) -> list[StopRule]:
    """The request's own stop rules. Raises ValueError for one that would end a row within a canvas."""
    rules, early = split_stop_rules(request.stop)
    if early:
        raise ValueError(
            f"stop={shown(request.stop)} ends a row within a block; a canvas closes as a whole, when it has settled "
            f"(settings of sampler {sampler.name!r})"
        )
    return [*rules]


def _starts(row: list[int], end: int, width: int) -> np.ndarray:
    """Where canvases begin in a row that is to be `end` long: each at the first position to fill that none covers."""
    holes = [*(position for position, token in enumerate(row) if token == HOLE), *range(len(row), end)]
    starts: list[int] = []
    for position in holes:
        if not starts or position >= starts[-1] + width:
            starts.append(position)
    return np.array(starts, np.int64)


def _randomness(request: Request, rows: list[list[int]], holes: bool) -> tuple[torch.Generator | None, list[int]]:
    """As `randomness`; transformers draws for rows of unequal prompts as for others."""
    if request.rng != "reference":
        return randomness(request, rows)
    if holes:
        raise ValueError("rng='reference' draws as transformers' generate does, which fills no holes: leave rng out")
    return randomness(request, [row[:1] for row in rows])


def _reuse(
    request: Request, model: Any, rows: list[list[int]], images: list[Any]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Which rows of the request's prefix each row takes over, and how many of its tokens: both [B] int64. The encoder
    is causal: any number is exact. Raises ValueError for a prefix of another model, or one with images."""
    prefix, pictured = request.prefix, any(image is not None for image in images)
    if request.keep_prefix and pictured:
        raise ValueError("keep_prefix=True keeps tokens alone, and the prompt has images: leave it out")
    if prefix is None:
        return None
    if not isinstance(prefix, KeptPrefix):
        raise ValueError(f"prefix={shown(prefix)} must be the `prefix` of an output made with keep_prefix=True")
    if pictured:
        raise ValueError("prefix=... is looked up by tokens, and the prompt has images: leave it out")
    prefix.check(model, SimpleNamespace(name="canvas", store_dtype=None))  # type: ignore[arg-type]
    source, counts = prefix.common(rows)
    num_leading = [row.index(HOLE) if HOLE in row else len(row) for row in rows]
    counts = np.minimum(counts, num_leading)
    return (source, counts) if counts.any() else None


def _setting(sampler: Any, defaults: Mapping[str, Any], name: str) -> Any:
    """What the sampler says, else the model."""
    value = getattr(sampler, name)
    return defaults[name] if value is None else value


def _steps(sampler: Any, request: Request, defaults: Mapping[str, Any], starts: list[np.ndarray]) -> int:
    """N: what the request spreads over a row's canvases, else the sampler's or the model's."""
    if request.steps is None:
        return int(_setting(sampler, defaults, "max_denoising_steps"))
    count = max(map(len, starts))
    if request.steps % count and len({len(row) for row in starts}) == 1:
        raise ValueError(
            f"steps={request.steps} must be a multiple of the number of canvases ({count}): each has as many"
        )
    if request.steps < count:
        raise ValueError(f"steps={request.steps} must be at least the number of canvases ({count})")
    return -(-request.steps // count)


def _temperatures(sampler: Any, defaults: Mapping[str, Any]) -> tuple[float, float]:
    t_min, t_max = (float(_setting(sampler, defaults, name)) for name in ("t_min", "t_max"))
    if t_min > t_max:
        raise ValueError(f"t_min={t_min} must be at most t_max={t_max}; what is not given is the model's")
    return t_min, t_max


def _settled(sampler: Any, defaults: Mapping[str, Any]) -> Settled | None:
    if not sampler.early_stop:
        return None
    return Settled(
        stability=_setting(sampler, defaults, "stability_threshold"),
        entropy=_setting(sampler, defaults, "confidence_threshold"),
    )
