"""Traces of DPad's public code, replayed in float64: every call's positions, what it committed, and the final tokens.

`rng="reference"` draws what is kept of a suffix as the public code does, so that the recorded sets come out.

What differs from the reference, and why:
- With early termination it waits until the block that holds an end token is full. Ours ends a row once all before the
  end token is decided, so that it may need fewer calls: those that it makes are compared, and the answer.
- DPad for Dream with a cache commits the block's first position from the whole call, however unsure, as Fast-dLLM does:
  replayed with the rule and cache of `test_traces_caches.py`.
- Its code for Dream compares probabilities among the 50 likeliest tokens, by a default
  of transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
from replay import (
    assert_confidences,
    cache_without_left,
    forced_first,
    load_trace,
    model_of,
    of_the_likeliest,
    our_feeds,
    replay_case,
    some_cases,
    their_feeds,
    trace_names,
    which,
)

from paradec import Suffix, samplers

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

NAMES = trace_names("dpad")


def suffix_of(settings: dict) -> Suffix:
    if settings["dropout"] == "gaussian":
        return Suffix(settings["window"], "gaussian", scale=settings["scale"], k_sigma=settings["sigma"])
    if settings["preserved_tokens"] == settings["window"]:
        return Suffix(settings["window"])
    return Suffix(settings["window"], "uniform", count=settings["preserved_tokens"])


@pytest.mark.parametrize("numbers", which(7))
@pytest.mark.parametrize("name", NAMES)
def test_dpad(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, end = trace["settings"], trace["eos_id"]
    sampler: Any = samplers.create("low_confidence")
    if settings["threshold"] is not None:
        sampler = samplers.create("threshold", threshold=settings["threshold"])
    cache: Any = settings["cache"]
    asked: dict[str, Any] = {"suffix": suffix_of(settings), "block_length": settings["block_length"]}
    model = model_of(trace)
    if model.facts.shift:
        sampler, others = of_the_likeliest(sampler)
        asked |= others
    if model.facts.shift and cache != "none":
        sampler, cache = forced_first(sampler), cache_without_left(cache == "dual")
    stops = settings["early_termination"]
    for name, case in some_cases(trace, numbers):
        pairs: list[Any] = []
        with replay_case(trace, name, case, pairs):
            theirs = their_feeds(case, settings["block_length"] if stops else None)
            ours, tokens = our_feeds(model, sampler, case, cache=cache, eos_early_stop=stops, **asked)
            pairs += zip(ours, theirs, strict=False)
            assert ours == theirs[: len(ours)]
            final, prompt = case["final_ids"][0], len(case["prompt_ids"][0])
            if stops:
                size = prompt + [*final[prompt:], end].index(end) + 1
                assert tokens[:size] == final[:size]
            else:
                assert tokens == final and len(ours) == len(theirs)
            if not model.facts.shift:  # there, probabilities are those among the likeliest tokens
                assert_confidences(ours, theirs)


def test_most_calls_leave_something_out() -> None:
    """What is compared above is not whole rows."""
    for name in NAMES:
        trace = load_trace(name)
        lengths = [(len(case["final_ids"][0]), case) for case in trace["cases"]]
        smaller = [any(len(fed.positions) < size for fed in their_feeds(case)) for size, case in lengths]
        assert all(smaller)
