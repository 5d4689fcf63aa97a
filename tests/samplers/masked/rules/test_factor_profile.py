"""`factor(profile=True)`, Fast-dLLM++: against a plain loop, beside the rule that it refines, and on the public traces.

For Dream the public code has it in cached calls alone, after a first token that it commits unasked: replayed with the
rule and cache of `test_traces_caches.py`, and with probabilities among the 50 likeliest tokens, by a default of
transformers. Of its batches every row moves on alone with us.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from replay import (
    assert_batches_move_together,
    assert_replayed,
    cache_without_left,
    decode,
    forced_first,
    load_trace,
    model_of,
    of_the_likeliest,
    trace_names,
)
from rule_views import random_scores, view_of

from paradec import samplers

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

NAMES = trace_names("fastdllm-plusplus")


def profile(row: list[float], margin: float) -> set[int]:
    """Ranks from the most confident on, until the doubts so far and the last one once more leave too little."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    chosen, total = {order[0]}, 1 - row[order[0]]
    for i in order[1:]:
        total += 1 - row[i]
        if not total + (1 - row[i]) < 1 - margin:
            break
        chosen.add(i)
    return chosen


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.25, 0.9, 1.0])
def test_a_plain_loop_says_the_same(margin: float) -> None:
    sampler, sizes = samplers.create("factor", profile=True, margin=margin), set()
    for seed in range(40):
        scores = 1 - (1 - random_scores(seed)) * 0.2
        scores = scores.masked_fill(random_scores(seed) == -math.inf, -math.inf)
        found = sampler.select(view_of(scores))
        for row, selected in zip(scores.tolist(), found, strict=True):
            expected = profile(row, margin)
            assert set(selected.nonzero()[:, 0].tolist()) == expected
            sizes.add(len(expected))
    assert sizes == {1} if margin == 1 else len(sizes) > 3


def test_the_bound_is_strict() -> None:
    """Two doubts of 1/8, and the last once more, are 3/8 = 1 - 5/8."""
    at = view_of(torch.tensor([[0.875, 0.875]], dtype=torch.float64))
    assert samplers.create("factor", profile=True, margin=0.625).select(at).tolist() == [[True, False]]
    below = view_of(torch.tensor([[0.875, math.nextafter(0.875, 1)]], dtype=torch.float64))
    assert samplers.create("factor", profile=True, margin=0.625).select(below).tolist() == [[True, True]]


def test_without_a_margin_it_commits_no_less_than_the_factor_rule() -> None:
    more = 0
    for seed in range(40):
        view = view_of(random_scores(seed))
        plain = samplers.create("factor").select(view)
        found = samplers.create("factor", profile=True, margin=0.0).select(view)
        tied = (2 * (1 - view.scores) == 1).any(-1, keepdim=True)  # strict here, not there
        assert (found | ~plain | tied).all()
        more += int((found & ~plain).sum())
    assert more > 0


@pytest.mark.parametrize("name", NAMES)
def test_public_traces(name: str) -> None:
    trace = load_trace(name)
    settings, model = trace["settings"], model_of(trace)
    sampler: Any = samplers.create("factor", profile=True, margin=settings["frechet_margin"])
    cache: Any = settings["cache"]
    asked: dict[str, Any] = {"block_length": settings["block_length"]}
    if model.facts.shift:
        sampler, others = of_the_likeliest(sampler)
        sampler, cache, asked = forced_first(sampler), cache_without_left(cache == "dual"), asked | others
    rows = decode(model, trace, sampler, cache=cache, **asked)
    if trace["batch_size"] > 1:
        assert_batches_move_together(rows, settings["block_length"])
    else:
        assert_replayed(rows)
