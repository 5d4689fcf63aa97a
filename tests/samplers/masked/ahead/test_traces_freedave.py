"""Recorded runs of FreeDave's public code, replayed in float64, with the mask token in the softmax.

Static decoding is compared call by call. With drafts, the public code commits the first step of a forward only after
the next forward has verified it; paradec commits it at once. So after every forward paradec is ahead by one step of
the base sampler (`assert_one_step_ahead`). The number of forwards is equal, and a forward evaluates the same drafts,
except the draft that fills the block. Other differences:
- With a threshold, the public code also calls the model on full blocks, at most once per block; paradec does not.
- The public decoder for Dream with a cache commits a block's first token without logits (`force_first_position`).
- The public eager mode drafts into the next block; only its final tokens are compared.

`test_by_answers` compares paradec's own answers. By default two cases of each of a few traces are replayed; the traces
cover every pair of settings. `-m full` replays all cases, also in float32, where only final tokens are compared.
"""

from typing import Any

import pytest
from traces import (
    Call,
    Row,
    assert_calls,
    cache_without_left_position,
    decode,
    force_first_position,
    group_by_case,
    insert_idle_calls,
    load_trace,
    mark_others_full,
    model_of,
    peek_trace,
    precisions,
    replay_rows,
    text_of,
    trace_names,
)

from paradec import samplers
from paradec.samplers.masked import reference
from paradec.samplers.masked.ahead.freedave import FreeDave
from paradec.samplers.masked.rules.low_confidence import LowConfidence
from paradec.samplers.masked.rules.threshold import Threshold

NAMES = trace_names("freedave", "freedave-dream")
STATIC = [name for name in NAMES if peek_trace(name)["settings"]["method"] == "static"]


class WeighsMask:
    """A mixin that includes the mask token in the softmax, like the public code."""

    def weighs_mask(self, state: Any) -> bool:
        return True

    def read_candidates(self, state: Any, logits: Any, query: Any, generator: Any) -> Any:
        return reference.read_candidates(self, state, logits, query, None)


class WeighingLowConfidence(WeighsMask, LowConfidence):
    pass


class WeighingThreshold(WeighsMask, Threshold):
    pass


def freedave(settings: dict, base: Any) -> FreeDave:
    threshold, count = settings.get("confidence_threshold"), settings.get("draft_steps", 1)
    mode = "tree" if settings.get("draft_mode") == "tree_attention" else "batch"
    agreement = "subset" if threshold is not None and count > 1 else "exact"
    return FreeDave(base=base, draft_steps=count, draft_mode=mode, agreement=agreement)


def request_of(settings: dict) -> dict:
    request = {"cache": "dual" if settings["dual_cache"] else "prefix", "rng": "counter"}
    return request | {name: settings[name] for name in ("block_length", "temperature")}


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize("name", mark_others_full(NAMES))
def test_trace(name: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, model = trace["settings"], model_of(trace, precision)
    threshold, static = settings.get("confidence_threshold"), settings["method"] == "static"
    base: Any = WeighingLowConfidence() if threshold is None else WeighingThreshold(threshold=threshold)
    arguments = request_of(settings)
    if model.facts.prediction == "shifted":
        base = force_first_position(base)
        arguments["cache"] = cache_without_left_position(settings["dual_cache"])
    rows = decode(model, trace, freedave(settings, base), alone=precision == "float32", numbers=numbers, **arguments)
    for case_rows in group_by_case(rows):
        with replay_rows(case_rows):
            for row in case_rows:
                assert row.tokens == row.final, row.where
                if precision == "float32":
                    continue
                if static:
                    calls = row.ours
                    if threshold is not None:
                        calls = insert_idle_calls(row, settings["block_length"], settings["dual_cache"])
                    assert_calls(calls, row.theirs, row.where)
                elif not settings.get("eager_acceptance_mode"):
                    assert_one_step_ahead(row, settings, model.facts.prediction == "shifted")


def assert_one_step_ahead(row: Row, settings: dict, forced: bool) -> None:
    """Assert that paradec's commits are the reference's commits and the base's next step, if the block has one left.

    forced: whether paradec and the reference commit a block's first token when it opens."""
    length, drafts = settings["block_length"], settings["draft_steps"]
    has_threshold = settings.get("confidence_threshold") is not None
    ours, our_commits, their_commits = iter(row.ours), set(), set()
    for number, call in enumerate(row.theirs):
        where = f"{row.where}, call {number}"
        block = len(their_commits) // length
        remaining = (block + 1) * length - len(their_commits)
        is_full = len(our_commits) == (block + 1) * length
        if is_full:
            assert has_threshold and remaining, where  # the call verifies the step that fills the block
        else:
            our_remaining, our_commits_before = (block + 1) * length - len(our_commits), set(our_commits)
            our_call: Call = next(ours)
            our_commits |= our_call.commits
        their_commits |= call.commits
        if is_full:
            assert their_commits == our_commits, where
            continue
        is_opening = len(our_commits_before) == block * length
        # their calls evaluate up to one draft per mask of the block; the last draft is a full block
        count = 1 if is_opening else min(drafts, remaining)
        assert call.evaluated % count == 0, where
        assert our_call.evaluated == call.evaluated // count * (1 if is_opening else min(drafts, our_remaining)), where
        assert our_commits_before <= their_commits <= our_commits, where
        if not has_threshold:
            is_level = len(our_commits) == (block + 1) * length or is_opening and forced
            assert len(our_commits - their_commits) == (0 if is_level else 1), where
    assert next(ours, None) is None and our_commits == their_commits, row.where


@pytest.mark.parametrize("name", mark_others_full(STATIC, together=1))
def test_by_answers(name: str) -> None:
    trace = load_trace(name)
    settings = trace["settings"] | {"draft_steps": 4}
    model = model_of(trace)
    threshold = settings.get("confidence_threshold")
    base = "low_confidence" if threshold is None else samplers.create("threshold", threshold=threshold)
    ours = theirs = 0
    for row in decode(model, trace, freedave(settings, base), **request_of(settings)):
        ours += text_of(trace, row.tokens[row.prompt :]) == row.case["answer"][0]
        theirs += row.case["correct"][0]
    assert ours >= theirs - 1
