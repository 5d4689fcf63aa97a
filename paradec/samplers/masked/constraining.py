"""How a masked request with a `constraint` begins: who serves it, and whether a text fits, before any work."""

from __future__ import annotations

from typing import Any

import numpy as np

from paradec.core.blocks import PipelinedBlocks
from paradec.core.checks import shown
from paradec.samplers.masked.constrained import Constrained
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stop_strings import StopStrings
from paradec.samplers.masked.stopping import EndOfText
from paradec.samplers.spans import no_texts, refused, spans_of


def constrained(sampler: Any, model: Any, state: MaskedState) -> Constrained:
    """The tracker of a request with a constraint.

    Raises:
        ValueError: a sampler, cache, block policy or stop rule that it does not work with; no tokenizer; or no text of
            the constraint fits a row.
    """
    refused(state.request.constraint, no_texts(model) | _reasons(sampler, state))
    suppressed = () if state.suppressed is None else tuple(state.suppressed.tolist())
    canvas = state.canvas.cpu().numpy()
    # with early rules a step looks at the row's end
    length = None if state.request.stop is not None else getattr(state.blocks, "length", None)
    width = canvas.shape[1] if length is None else length
    spans = spans_of(model, state, suppressed, canvas, state.mask_id, width)
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
