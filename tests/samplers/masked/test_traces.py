"""Token-for-token traces of the public reference implementations, replayed through `load` and `generate` in float64:
LLaDA, Dream, and both versions of Fast-dLLM without cache.

Of every case that is the same in float64, final tokens, the number of forwards, and what each of them evaluated and
committed are the reference's. That the mask's own probability counts, as it does in the public code and here with
`rng="reference"`, decides many steps of the rules that rank positions (`paradec.samplers.masked.reference.read`).

What differs from the references, and why:
- Dream's `origin`: the reference runs all its steps even when nothing is masked any more; we stop there. Its remaining
  steps are checked to be empty.
- Batches whose rows take unequally many steps (a threshold): the reference moves all rows to the next block together;
  our rows move on alone. A row's calls come in the same order, and the number of forwards is what it takes to wait.
- `factor`: the reference commits the last masked position when it alone fails the rule. Replayed with
  `reference_last_rank=True`; `test_factor_quirk` says what becomes of the others.

By default traces with every setting are replayed (`replay.often`), and all with `-m full`, in float32 too:
final tokens and the number of forwards are compared there.
"""

from __future__ import annotations

import pytest
import torch
from places import GOLDEN
from recorded import read_arrays, refuse_others, replay
from replay import (
    PRECISIONS,
    assert_batches_move_together,
    assert_replayed,
    by_case,
    cache_of,
    checkpoint,
    decode,
    head_of,
    load_trace,
    loaded,
    model_of,
    models_of_methods,
    others_are_full,
    replay_rows,
    request_of,
    some_cases,
    trace_names,
)

from paradec import samplers

METHODS = ("llada", "dream", "fastdllm", "fastdllm-jun25", "fastdllm-dream")
NAMES = [name for name in trace_names(*METHODS) if cache_of(head_of(name)) == "none"]
ELSEWHERE = {"adablock", "adablock-dream", "dinfer", "dkv", "dkv-dream", "freedave", "freedave-dream"}
ELSEWHERE |= {"dpad", "d2cache", "fastdllm-plusplus", "d3llm", "d2f", "lopa"}
"""Replayed by the other files of this kind."""


def test_no_method_without_a_replay() -> None:
    names = trace_names(*models_of_methods().keys() - {*METHODS} - ELSEWHERE)
    refuse_others("traces", [case for name in names for case, _ in some_cases(head_of(name) | {"file": name}, None)])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", others_are_full(NAMES, together=1))
def test_trace(name: str, precision: str) -> None:
    trace = load_trace(name)
    settings, exact = trace["settings"], precision == "float64"
    sampler, arguments = request_of(trace)
    rows = decode(model_of(trace, precision), trace, sampler, alone=not exact, **arguments)
    if settings.get("alg") == "origin":
        for together in by_case(rows):
            with replay_rows(together):
                assert not any(call.commits for row in together for call in row.theirs[len(row.ours) :])
            for row in together:
                row.theirs = row.theirs[: len(row.ours)]
    if trace["batch_size"] > 1 and settings.get("threshold") is not None:
        assert_batches_move_together(rows, settings["block_length"], exact)
    else:
        assert_replayed(rows, exact)


def test_factor_quirk() -> None:
    """The rule as published first differs from the reference's code where the last masked position alone fails: that
    one is left for the next forward."""
    differing = 0
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
            differing += 1
            ours, theirs = (call.commits for call in pair)
            (last,) = theirs - ours
            decided = set().union(*(call.commits for call in row.theirs[: row.theirs.index(pair[1]) + 1]))
            length = arguments["block_length"]
            block = (last[0] - row.prompt) // length
            assert ours < theirs, row.where
            assert sum((at - row.prompt) // length == block for at, _ in decided) == length, row.where
    assert differing


@pytest.mark.parametrize("name", sorted(set().union(*models_of_methods().values())))
@pytest.mark.parametrize("part", ["full", "half"])
def test_logits(name: str, part: str) -> None:
    """Within 1e-5 of the reference's logits, relative to their largest magnitude (about 11).

    Absolute differences stay below 1e-5 for llada-tiny; one position of dream-tiny amplifies float32 rounding so much
    that the reference itself is 2e-4 from its float64 value, and processors differ there by 3e-5.
    """
    model, file = loaded(checkpoint(name), "float32"), checkpoint(name) / "logits_check.safetensors"
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
