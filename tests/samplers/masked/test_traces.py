"""Recorded runs of LLaDA, Dream, Fast-dLLM, dInfer and AdaBlock without a cache, replayed in float64.

Final tokens, the number of forwards, and each forward's evaluated positions and commits equal the reference's.
`rng="reference"` includes the mask token in the softmax, as the references do. The references differ from paradec in
these points:
- Dream's `origin` runs all its steps even if no mask is left. The test checks that the remaining steps are empty.
- In a batch the reference opens the next block of all rows together; in paradec rows are independent. The order of a
  row's calls is equal, and the reference's number of forwards follows from the slowest row of each block.
- The reference's `factor` also commits the last mask of a block if no other mask fails the rule. It is replayed with
  `reference_last_rank=True`; `test_factor_quirk` checks paradec's default.
- dInfer checks only after several forwards whether a block is full. `insert_dinfer_calls` inserts its idle calls.
- dInfer stops after a block with an end token, and with `early_stop` fills the remaining positions. Only decided tokens
  are compared, and paradec with early stop takes at most as many forwards.
- dInfer also commits positions within 1e-5 of the best, which makes no difference on these traces.
Credit is replayed with both storage formats.

By default two cases of each of a few traces are replayed; the traces cover every setting. `-m full` replays all cases,
also in float32, where only final tokens and the number of forwards are compared.
"""

import functools
from collections import defaultdict

import pytest
import torch
from places import GOLDEN
from recorded import is_packaged, read_arrays, read_json_unrecorded, refuse, replay
from traces import (
    TRACES,
    Call,
    Row,
    assert_batches_move_together,
    assert_calls,
    assert_replayed,
    cache_of,
    checkpoint,
    decode,
    group_by_case,
    load_model,
    load_trace,
    mark_others_full,
    model_of,
    peek_trace,
    precisions,
    replay_rows,
    request_of,
    select_cases,
    trace_names,
)

from paradec import samplers
from paradec.core.protocol import Sampler

METHODS = ("llada", "dream", "fastdllm", "fastdllm-jun25", "fastdllm-dream")
NAMES = [name for name in trace_names(*METHODS) if cache_of(peek_trace(name)) == "none"]
REPLAYED_ELSEWHERE = {"adablock", "adablock-dream", "dinfer", "dkv", "dkv-dream", "freedave", "freedave-dream"}
REPLAYED_ELSEWHERE |= {"dpad", "d2cache", "fastdllm-plusplus", "d3llm", "d2f", "lopa"}
"""Methods that are replayed in other test files."""


@functools.cache
def models_of_methods() -> dict[str, set[str]]:
    """Return folder of traces -> names of the checkpoints that the traces use."""
    models: dict[str, set[str]] = defaultdict(set)
    for path in TRACES.glob("*/*.json"):
        trace = read_json_unrecorded(path)
        if "cases" in trace and "model" in trace:
            models[path.parent.name].add(trace["model"])
    return models


def test_no_method_without_a_replay() -> None:
    """Refuse cases of methods without a replay; no packaged case is refused."""
    for name in trace_names(*models_of_methods().keys() - {*METHODS} - REPLAYED_ELSEWHERE):
        for case, _ in select_cases(peek_trace(name) | {"file": name}, None):
            assert not is_packaged("traces"), case
            refuse(case, "paradec does not have the method (docs/fidelity.md)")


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize("name", mark_others_full(NAMES, together=1))
def test_trace(name: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, exact = trace["settings"], precision == "float64"
    sampler, arguments = request_of(trace)
    rows = decode(model_of(trace, precision), trace, sampler, alone=not exact, numbers=numbers, **arguments)
    if settings.get("alg") == "origin":
        for case_rows in group_by_case(rows):
            with replay_rows(case_rows):
                assert not any(call.commits for row in case_rows for call in row.theirs[len(row.ours) :])
            for row in case_rows:
                row.theirs = row.theirs[: len(row.ours)]
    if trace["batch_size"] > 1 and settings.get("threshold") is not None:
        assert_batches_move_together(rows, settings["block_length"], exact)
    else:
        assert_replayed(rows, exact)


def test_factor_quirk() -> None:
    """If only the last masked position fails the rule, the public code commits it; paradec's default does not."""
    num_different = 0
    for name in NAMES:
        trace = load_trace(name)
        factor = trace["settings"].get("factor")
        if factor is None:
            continue
        _, arguments = request_of(trace)
        for row in decode(model_of(trace), trace, samplers.create("factor", factor=factor), **arguments):
            assert row.nfe >= len(row.theirs), row.where
            pair = next((pair for pair in zip(row.ours, row.theirs) if pair[0] != pair[1]), None)
            if pair is None:
                assert len(row.ours) == len(row.theirs)
                continue
            num_different += 1
            ours, theirs = (call.commits for call in pair)
            (last,) = theirs - ours
            decided = set().union(*(call.commits for call in row.theirs[: row.theirs.index(pair[1]) + 1]))
            length = arguments["block_length"]
            block = (last[0] - row.prompt) // length
            assert ours < theirs, row.where
            assert sum((at - row.prompt) // length == block for at, _ in decided) == length, row.where
    assert num_different


@pytest.mark.parametrize("name", sorted(set().union(*models_of_methods().values())))
@pytest.mark.parametrize("part", ["full", "half"])
def test_logits(name: str, part: str) -> None:
    """Logits equal the reference's, up to 1e-5 times the largest logit.

    (dream-tiny amplifies float32 rounding: the reference's float32 logits differ by 2e-4 from its float64 logits.)"""
    model, file = load_model(checkpoint(name), "float32"), checkpoint(name) / "logits_check.safetensors"
    if not file.exists():
        pytest.skip("no logits were recorded")
    check = read_arrays(file)
    with replay(f"{name}, logits of {part}"):
        with torch.inference_mode():
            logits = model.module(input_ids=check[f"ids_{part}"], use_cache=False).logits
        difference = (logits - check[f"logits_{part}"]).abs().max()
        assert difference <= 1e-5 * check[f"logits_{part}"].abs().max()
        if checkpoint(name) == GOLDEN / "llada-tiny":
            assert difference <= 1e-5


NAMES_DINFER = trace_names("dinfer")
CREDIT = {"credit_alpha": "fusion", "boost_gamma": "exponent", "decay_beta": "decay"}


def is_credit(name: str) -> bool:
    return peek_trace(name)["setting"].startswith("credit")  # "settings" lacks those with default values


def sampler_of(trace: dict, storage: str) -> Sampler:
    decoder = {key: value for key, value in trace["settings"]["decoder"].items() if key != "use_float64"}
    if storage:
        settings = {CREDIT.get(key, key): value for key, value in decoder.items()}
        return samplers.create("credit", preset="dinfer", storage=storage, **settings)
    return samplers.create("hierarchy" if "low_threshold" in decoder else "threshold", **decoder)


def insert_dinfer_calls(rows: list[Row], settings: dict, end: int) -> list[list[Call]]:
    """Return paradec's calls for the rows of a case with dInfer's idle calls, up to the block where dInfer stops."""
    length, evaluated = settings["block_length"], len(rows[0].final)
    filled = [False] * len(rows)
    calls: list[list[Call]] = [[] for _ in rows]
    for block, steps in enumerate(zip(*(row.blocks(length) for row in rows), strict=True)):
        steps = [[] if is_full else row_steps for row_steps, is_full in zip(steps, filled, strict=True)]
        num_done = 0
        while remaining := sum(len(call.commits) for row_steps in steps for call in row_steps[num_done:]):
            num_done += min(max(remaining // settings["expected_tpf"], 1), settings["maximum_unroll"])
        for row_steps, row_calls in zip(steps, calls, strict=True):
            row_calls += row_steps + [Call(evaluated, frozenset())] * (num_done - len(row_steps))
        have_ends = [any(token == end for call in row_steps for _, token in call.commits) for row_steps in steps]
        if settings["early_stop"]:
            fill = {(at, end) for at in range(rows[0].prompt + (block + 1) * length, evaluated)}
            for row_calls, has_end in zip(calls, have_ends, strict=True):
                if has_end:
                    row_calls[-1] = Call(evaluated, row_calls[-1].commits | fill)
            filled = [is_full or has_end for is_full, has_end in zip(filled, have_ends, strict=True)]
        if all(is_full or has_end for is_full, has_end in zip(filled, have_ends, strict=True)):
            break
    return calls


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize(
    ("name", "storage"), [(n, s) for n in NAMES_DINFER for s in (("dense", "slots") if is_credit(n) else ("",))]
)
def test_dinfer(name: str, storage: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, sampler = trace["settings"], sampler_of(trace, storage)
    model = model_of(trace, precision)
    arguments = {"block_length": settings["block_length"], "alone": precision == "float32", "numbers": numbers}
    for rows in group_by_case(decode(model, trace, sampler, **arguments)):
        with replay_rows(rows):
            for row, calls in zip(rows, insert_dinfer_calls(rows, settings, trace["eos_id"]), strict=True):
                assert_calls(calls, row.theirs, row.where)
                decided = [at for at, token in enumerate(row.final) if token != trace["mask_id"]]
                assert [row.tokens[at] for at in decided] == [row.final[at] for at in decided]
    for rows in group_by_case(decode(model, trace, sampler, eos_early_stop=True, **arguments)):
        with replay_rows(rows):
            for row in rows:
                assert row.nfe <= len(row.theirs), row.where
                answer = row.tokens[row.prompt :]
                length = answer.index(trace["eos_id"]) + 1 if trace["eos_id"] in answer else len(answer)
                assert answer[:length] == row.final[row.prompt : row.prompt + length], row.where


NAMES_ADABLOCK = [name for name in trace_names("adablock", "adablock-dream") if cache_of(peek_trace(name)) == "none"]


@pytest.mark.parametrize(("precision", "numbers"), precisions(2, 5))
@pytest.mark.parametrize("name", NAMES_ADABLOCK)
def test_adablock(name: str, precision: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    exact = precision == "float64"
    sampler, arguments = request_of(trace)
    rows = decode(model_of(trace, precision), trace, sampler, alone=not exact, numbers=numbers, **arguments)
    assert_replayed(rows, exact)


def test_traces_have_adaptive_blocks() -> None:
    """Some of the replayed traces have blocks of different lengths."""
    lengths = [case["extra"]["block_history"] for name in NAMES_ADABLOCK for case in peek_trace(name)["cases"]]
    assert sum(len(set(history)) > 1 for history in lengths) >= 20
    assert any(max(history) > 16 or 1 in history for history in lengths)
