"""Recorded runs of dKV-Cache, of Fast-dLLM and AdaBlock with prefix and dual caches, and of DPad, replayed in float64.

Final tokens, the number of forwards, and each forward's evaluated positions and commits equal the reference's.
The references differ from paradec in these points:
- Fast-dLLM of June 2025 makes an additional call after a block's full forward, even if the block has no masks left. The
  test inserts this call into paradec's calls.
- In some references all rows of a batch open their next block together (see `test_traces.py`).
- Fast-dLLM, AdaBlock and DPad for Dream commit the first token of a block without logits for it. paradec evaluates the
  position left of the block, which predicts it. `test_forced_first_token` replays with a rule and a cache that imitate
  the public code; `test_forced_first_token_by_answers` compares paradec's own answers.
- dKV-Cache's `random` draws numbers only for evaluated positions. It is replayed with `RandomOverEvaluated`.
- dKV-Cache for Dream with `shift_type="right"` commits tokens without logits for them (0 of 8 answers are right). Only
  the number of forwards is compared.
- DPad with early termination completes a block with an end token. paradec ends a row once every position before the end
  token is decided; the answer and the calls up to this point are compared.
- DPad for Dream computes probabilities among the 50 most likely tokens, a default of transformers.

By default two cases of each of a few traces are replayed; the traces cover every setting. `-m full` replays all cases,
also in float32, where only final tokens and the number of forwards are compared.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from traces import (
    assert_batches_move_together,
    assert_calls,
    assert_confidences,
    assert_replayed,
    cache_of,
    cache_without_left_position,
    decode,
    decode_forwards,
    force_first_position,
    group_by_case,
    insert_idle_calls,
    load_trace,
    mark_others_full,
    model_of,
    peek_trace,
    precisions,
    recorded_forwards,
    replay_case,
    replay_rows,
    request_of,
    restrict_to_top_k,
    select_cases,
    some_or_all,
    text_of,
    trace_names,
)

from paradec import Suffix, caches, samplers
from paradec.samplers.masked.rules.random import Random
from paradec.samplers.masked.state import MaskedState

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

BLOCKS = [n for n in trace_names("fastdllm", "fastdllm-jun25", "adablock") if cache_of(peek_trace(n)) != "none"]
FORCED = [n for n in trace_names("fastdllm-dream", "adablock-dream") if cache_of(peek_trace(n)) != "none"]
DKV = trace_names("dkv", "dkv-dream")


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize("name", mark_others_full(BLOCKS, together=1))
def test_block_caches(name: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    exact, has_threshold = precision == "float64", trace["settings"].get("threshold") is not None
    sampler, arguments = request_of(trace)
    rows = decode(model_of(trace, precision), trace, sampler, alone=not exact, numbers=numbers, **arguments)
    if trace["method"] == "fastdllm-jun25" and has_threshold:
        for case_rows in group_by_case(rows):
            with replay_rows(case_rows):
                for row in case_rows:
                    calls = insert_idle_calls(row, arguments["block_length"], arguments["cache"] == "dual")
                    assert row.tokens == row.final and len(calls) == len(row.theirs), row.where
                    if exact:
                        assert_calls(calls, row.theirs, row.where)
    elif trace["batch_size"] > 1 and has_threshold:
        assert_batches_move_together(rows, arguments["block_length"], exact)
    else:
        assert_replayed(rows, exact)


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize("name", mark_others_full(FORCED, together=1))
def test_forced_first_token(name: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    exact = precision == "float64"
    sampler, arguments = request_of(trace)
    arguments["cache"] = cache_without_left_position(arguments["cache"] == "dual")
    model, sampler = model_of(trace, precision), force_first_position(sampler)
    assert_replayed(decode(model, trace, sampler, alone=not exact, numbers=numbers, **arguments), exact)


@pytest.mark.parametrize("name", mark_others_full(FORCED, together=1))
def test_forced_first_token_by_answers(name: str) -> None:
    """If paradec has fewer right answers than the public code, the difference is 1."""
    trace = load_trace(name)
    sampler, arguments = request_of(trace)
    num_right = num_right_of_reference = 0
    for row in decode(model_of(trace), trace, sampler, **arguments):
        num_right += text_of(trace, row.tokens[row.prompt :]) == row.case["answer"][0]
        num_right_of_reference += row.case["correct"][0]
    assert num_right >= num_right_of_reference - 1


@dataclass(frozen=True)
class RandomOverEvaluated(Random):
    """Draw numbers for evaluated positions only, in ascending order, like dKV-Cache's code."""

    def position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        (part,) = state.cache.plan(state)
        evaluated = torch.as_tensor(part.positions)
        noise = torch.zeros(state.canvas.shape, dtype=torch.float64)
        noise.scatter_(1, evaluated, torch.rand(evaluated.shape, generator=generator).double())
        return state.window.read(noise)


def dkv_request(settings: dict) -> tuple[Any, dict]:
    """Return sampler and request for a trace of dKV-Cache on LLaDA."""
    request = {name: settings[name] for name in ("temperature", "block_length", "steps")}
    greedy = settings["variant"] == "greedy"
    if not settings["enable_cache"]:
        cache: Any = "none"
    elif greedy:
        interval = settings["cache_reloading_step"]
        cache = caches.create("dkv_greedy", refresh_interval=interval, window=settings["window_size"])
    else:
        cache = caches.create("dkv_decode", refresh_interval=settings["cache_reloading_step"])
    if greedy:
        sampler = samplers.create("random", order="block")
    else:
        sampler = RandomOverEvaluated() if settings["remasking"] == "random" else samplers.create("low_confidence")
    return sampler, request | {"cache": cache}


def dkv_dream_request(settings: dict) -> tuple[Any, dict]:
    """Return sampler and request for a trace of dKV-Cache on Dream."""
    sampler = samplers.create(settings["alg"], eps=settings["eps"], alg_temp=settings["alg_temp"])
    request = {name: settings[name] for name in ("temperature", "steps", "top_p", "top_k")}
    if not settings["use_cache"]:
        return sampler, request
    if settings["cache_type"] == "prefill":
        return sampler, request | {"cache": "dkv_prefill"}
    name = {"decoded": "dkv_decode", "pd": "dkv_pd"}[settings["cache_type"]]
    fields = {"refresh_interval": settings["cache_steps"], "shift_type": settings["shift_type"]}
    return sampler, request | {"cache": caches.create(name, **fields)}


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize("name", mark_others_full(DKV, together=1))
def test_dkv(name: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    exact = precision == "float64"
    sampler, arguments = (dkv_request if trace["method"] == "dkv" else dkv_dream_request)(trace["settings"])
    rows = decode(model_of(trace, precision), trace, sampler, alone=not exact, numbers=numbers, **arguments)
    if trace["settings"].get("shift_type") == "right" and trace["settings"]["use_cache"]:
        for case_rows in group_by_case(rows):
            with replay_rows(case_rows):
                assert [row.nfe for row in case_rows] == [len(row.theirs) for row in case_rows]
        return
    assert_replayed(rows, exact)


def test_every_cached_trace_has_calls_of_different_widths() -> None:
    """The only exceptions are traces with at most one call per block."""
    for name in [*BLOCKS, *FORCED, *DKV]:
        trace = load_trace(name)
        settings, cases = trace["settings"], trace["cases"]
        if not settings.get("use_cache", settings.get("enable_cache", True)):
            continue
        blocks = -(-settings["gen_length"] // settings.get("block_length", settings.get("init_block_length", 1)))
        widths = {step["input_shape"][1] for case in cases for step in case["steps"]}
        assert len(widths) > 1 or all(case["nfe"] <= blocks for case in cases), name


DPAD = trace_names("dpad")


def suffix_of(settings: dict) -> Suffix:
    if settings["dropout"] == "gaussian":
        return Suffix(settings["window"], "gaussian", scale=settings["scale"], k_sigma=settings["sigma"])
    if settings["preserved_tokens"] == settings["window"]:
        return Suffix(settings["window"])
    return Suffix(settings["window"], "uniform", count=settings["preserved_tokens"])


@pytest.mark.parametrize("numbers", some_or_all(7))
@pytest.mark.parametrize("name", DPAD)
def test_dpad(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, end = trace["settings"], trace["eos_id"]
    sampler: Any = samplers.create("low_confidence")
    if settings["threshold"] is not None:
        sampler = samplers.create("threshold", threshold=settings["threshold"])
    cache: Any = settings["cache"]
    request: dict[str, Any] = {"suffix": suffix_of(settings), "block_length": settings["block_length"]}
    model = model_of(trace)
    if model.facts.shift:
        sampler, top_k_arguments = restrict_to_top_k(sampler)
        request |= top_k_arguments
    if model.facts.shift and cache != "none":
        sampler, cache = force_first_position(sampler), cache_without_left_position(cache == "dual")
    stops = settings["early_termination"]
    for name, case in select_cases(trace, numbers):
        pairs: list[Any] = []
        with replay_case(trace, name, case, pairs):
            recorded = recorded_forwards(case, settings["block_length"] if stops else None)
            ours, tokens = decode_forwards(model, sampler, case, cache=cache, eos_early_stop=stops, **request)
            pairs += zip(ours, recorded, strict=False)
            assert ours == recorded[: len(ours)]
            final, prompt = case["final_ids"][0], len(case["prompt_ids"][0])
            if stops:
                size = prompt + [*final[prompt:], end].index(end) + 1
                assert tokens[:size] == final[:size]
            else:
                assert tokens == final and len(ours) == len(recorded)
            if not model.facts.shift:  # Dream's recorded probabilities are among the 50 most likely tokens
                assert_confidences(ours, recorded)


def test_every_dpad_case_has_calls_that_skip_positions() -> None:
    for name in DPAD:
        trace = load_trace(name)
        lengths = [(len(case["final_ids"][0]), case) for case in trace["cases"]]
        assert all([any(len(call.positions) < size for call in recorded_forwards(case)) for size, case in lengths])
