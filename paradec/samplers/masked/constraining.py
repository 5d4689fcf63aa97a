"""How a masked request with a `constraint` begins: who serves it, and whether a text fits, before any work."""

from __future__ import annotations

from typing import Any

import numpy as np

from paradec.constraints.values import Constraint
from paradec.core.checks import shown
from paradec.core.pipelined_blocks import PipelinedBlocks
from paradec.samplers.masked.constrained import Constrained
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stop_strings import StopStrings
from paradec.samplers.masked.stopping import EndOfText
from paradec.samplers.spans import Span, no_texts, refused, span_of


def constrained(sampler: Any, model: Any, state: MaskedState) -> Constrained:
    """The tracker of a request with a constraint.

    Raises:
        ValueError: a sampler, cache, block policy or stop rule that it does not work with; no tokenizer; or no text of
            the constraint fits a row.
    """
    refused(state.request.constraint, no_texts(model) | _reasons(sampler, state))
    canvas, known = state.canvas.cpu().numpy(), dict[Any, Span]()
    spans = [_texts_of(model, state, row, canvas[row], known) for row in range(state.batch)]
    return Constrained(spans, None if state.request.temperature == 0 else np.zeros(state.batch))


def _reasons(sampler: Any, state: MaskedState) -> dict[str, bool]:
    """Why a sampler and the other arguments of a request could not serve a constraint, and whether it is so."""
    needs, request, methods = sampler.needs, state.request, getattr(sampler, "rules", (sampler,))
    return {
        f"sampler {sampler.name!r} drafts steps ahead of the text": needs.multi_step,
        f"sampler {sampler.name!r} replaces what it has decided": needs.revises or needs.mask_probes,
        f"sampler {sampler.name!r} counts the positions of several steps ahead": hasattr(sampler, "targets"),
        f"sampler {sampler.name!r} draws every token once more, by itself": (
            _overrides(sampler, "read") and request.temperature > 0
        ),
        f"sampler {sampler.name!r} cuts rows off before their end; give eos_early_stop=False": (
            request.eos_early_stop and any(_overrides(each, "trim") for each in methods)
        ),
        f"cache={state.cache.name!r} leaves undecided positions of the block unevaluated": (
            state.cache.facts.evaluates not in ("block", "undecided")
        ),
        f"blocks={shown(state.blocks)} have several blocks of a row open at once": (
            isinstance(state.blocks, PipelinedBlocks)
        ),
        f"blocks={shown(state.blocks)} end where single candidates say so": (
            getattr(state.blocks, "reads_logits", False)
        ),
        "rng='reference' draws every token by itself": request.rng == "reference",
        "stop_strings may end a row before its text is whole": request.stop_strings is not None,
        f"stop={shown(request.stop)} may end a row before its text is whole": (
            any(not isinstance(rule, (EndOfText, StopStrings)) for rule in state.stop_rules)
        ),
    }


def _overrides(sampler: Any, method: str) -> bool:
    """Whether a sampler has a method of `MaskedSampler` of its own; that class begins requests through this module."""
    base = next(each for each in type(sampler).__mro__ if each.__name__ == "MaskedSampler")
    return getattr(type(sampler), method) is not getattr(base, method)


def _texts_of(model: Any, state: MaskedState, row: int, canvas: np.ndarray, known: dict[Any, Span]) -> tuple[Span, ...]:
    """The spans of a row, whose canvas [L] is as decoding finds it."""
    begin, answer, stop = (int(array[row]) for array in (state.prompt_length, state.answer_start, state.asked))
    value: Any = state.request.constraint
    if isinstance(value, Constraint):
        return (_span(model, state, value, canvas, begin, stop, stop > answer, known),)
    masked = np.concatenate(([False], canvas[:stop] == state.mask_id, [False]))
    edges = np.flatnonzero(masked[1:] != masked[:-1]).reshape(-1, 2).tolist()
    if len(value) != len(edges):
        raise ValueError(
            f"constraint has {len(value)} entries, and row {row} {len(edges)} holes, with the answer after its text; "
            "give one for each, None where it is free"
        )
    return tuple(
        _span(model, state, entry, canvas, first, end, first >= answer, known)
        for entry, (first, end) in zip(value, edges, strict=True)
        if entry is not None
    )


def _span(
    model: Any,
    state: MaskedState,
    value: Constraint,
    canvas: np.ndarray,
    first: int,
    stop: int,
    ends: bool,
    known: dict[Any, Span],
) -> Span:
    """The span of a constraint from `first` to `stop`; ends: whether end tokens may follow its text."""
    given = [None if token == state.mask_id else token for token in canvas[first:stop].tolist()]
    suppressed = () if state.suppressed is None else tuple(state.suppressed.tolist())
    return span_of(model, value, suppressed, given, first, ends, state.max_new_tokens, known)
