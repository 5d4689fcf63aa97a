"""Traces of dInfer's threshold, hierarchy and credit decoders, replayed in float64 with `rng="reference"`, which like
the public code leaves the mask's own probability in the softmax.

Every forward commits what the reference's does. What differs, and why:
- dInfer unrolls its loop: it forwards several times between two looks at the canvas, though the block may be full.
  Ours looks after every forward. Replayed calls are compared with the idle ones put in that its rule makes
  (`unrolled`), so that their number is the reference's, too.
- dInfer stops after the block that holds an end of text. With `early_stop` it fills what is after it, else it leaves
  masks there. Compared is what it decided; ours is then run to its own stop, which comes no later.
- Rows of a batch are in all calls until each of them has an end of text.
- Its comparisons are strict and it takes everything within 1e-5 of the best position with it; on these traces neither
  makes a difference. Credit is replayed with both ways to keep it.

In float32 (`-m full`) the same is compared: no rule here ranks positions.
"""

from __future__ import annotations

import pytest
from replay import (
    PRECISIONS,
    Call,
    Row,
    assert_calls,
    by_case,
    decode,
    head_of,
    load_trace,
    model_of,
    replay_rows,
    trace_names,
)

import paradec
from paradec import samplers
from paradec.core.protocol import Sampler

NAMES = trace_names("dinfer")
CREDIT = {"credit_alpha": "fusion", "boost_gamma": "exponent", "decay_beta": "decay"}


def is_credit(name: str) -> bool:
    return head_of(name)["setting"].startswith("credit")  # at its defaults nothing else says so


def sampler_of(trace: dict, storage: str) -> Sampler:
    decoder = {key: value for key, value in trace["settings"]["decoder"].items() if key != "use_float64"}
    if storage:
        settings = {CREDIT.get(key, key): value for key, value in decoder.items()}
        return samplers.create("credit", preset="dinfer", storage=storage, **settings)
    return samplers.create("hierarchy" if "low_threshold" in decoder else "threshold", **decoder)


def unrolled(rows: list[Row], settings: dict, end: int) -> list[list[Call]]:
    """Our calls as dInfer makes them for the rows of one case, up to the end of the block where it stops."""
    length, evaluated = settings["block_length"], len(rows[0].final)
    filled = [False] * len(rows)
    calls: list[list[Call]] = [[] for _ in rows]
    for block, steps in enumerate(zip(*(row.blocks(length) for row in rows), strict=True)):
        steps = [[] if full else one for one, full in zip(steps, filled, strict=True)]
        done = 0
        while left := sum(len(call.commits) for one in steps for call in one[done:]):
            done += min(max(left // settings["expected_tpf"], 1), settings["maximum_unroll"])
        for one, mine in zip(steps, calls, strict=True):
            mine += one + [Call(evaluated, frozenset())] * (done - len(one))
        ended = [any(token == end for call in one for _, token in call.commits) for one in steps]
        if settings["early_stop"]:
            fill = {(at, end) for at in range(rows[0].prompt + (block + 1) * length, evaluated)}
            for mine, ends in zip(calls, ended, strict=True):
                if ends:
                    mine[-1] = Call(evaluated, mine[-1].commits | fill)
            filled = [full or ends for full, ends in zip(filled, ended, strict=True)]
        if all(full or ends for full, ends in zip(filled, ended, strict=True)):
            break
    return calls


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "storage"), [(n, s) for n in NAMES for s in (("dense", "slots") if is_credit(n) else ("",))]
)
def test_trace(name: str, storage: str, precision: str) -> None:
    trace = load_trace(name)
    settings, sampler = trace["settings"], sampler_of(trace, storage)
    model = model_of(trace, precision)
    arguments = {"block_length": settings["block_length"], "alone": precision == "float32"}
    for rows in by_case(decode(model, trace, sampler, **arguments)):
        with replay_rows(rows):
            for row, calls in zip(rows, unrolled(rows, settings, trace["eos_id"]), strict=True):
                assert_calls(calls, row.theirs, row.where)
                decided = [at for at, token in enumerate(row.final) if token != trace["mask_id"]]
                assert [row.tokens[at] for at in decided] == [row.final[at] for at in decided]
    for rows in by_case(decode(model, trace, sampler, eos_early_stop=True, **arguments)):
        with replay_rows(rows):
            for row in rows:
                assert row.nfe <= len(row.theirs), row.where
                answer = row.tokens[row.prompt :]
                length = answer.index(trace["eos_id"]) + 1 if trace["eos_id"] in answer else len(answer)
                assert answer[:length] == row.final[row.prompt : row.prompt + length], row.where


@pytest.mark.parametrize("name", [name for name in NAMES if is_credit(name)][:1])
def test_credit_counts_the_mask_as_other_rules_do(name: str) -> None:
    trace = load_trace(name)
    model = model_of(trace)
    prompts = [case["prompt_ids"][0] for case in trace["cases"]]
    prompts = [prompt for prompt in prompts if len(prompt) == len(prompts[0])]
    found = [
        paradec.generate(
            model, prompts, sampler=sampler, rng="reference", seed=0, max_new_tokens=16, block_length=8, trace=True
        ).trace.steps
        for sampler in (samplers.create("credit", fusion=0.0), samplers.create("threshold"))
    ]
    commits = [[commit for step in steps for commit in step.commits] for steps in found]
    assert [commit[:3] for commit in commits[0]] == [commit[:3] for commit in commits[1]]
    assert all(abs(one[3] - other[3]) < 1e-9 for one, other in zip(*commits, strict=True))
