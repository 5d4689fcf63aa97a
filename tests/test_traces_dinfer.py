"""Traces of dInfer's threshold, hierarchy and credit decoders, replayed in float64 with `rng="reference"`, which like the
public code leaves the mask's own probability in the softmax.

Every forward commits what the reference's does. What differs, and why:
- dInfer unrolls its loop: it forwards several times between two looks at the canvas, though the block may be full.
  Ours looks after every forward. Replayed calls are compared with the idle ones put in that its rule makes
  (`unrolled`), so that their number is the reference's, too.
- dInfer stops after the block that holds an end of text. With `early_stop` it fills what is behind it, else it leaves
  masks there. Compared is what it decided; ours is then run to its own stop, which comes no later.
- Rows of a batch are in all calls until the last of them has stopped.
- Its comparisons are strict and it takes everything within 1e-5 of the best position with it; on these traces neither
  makes a difference. Credit is replayed with both ways to keep it.

In float32 (`-m full`) the same is compared: no rule here ranks positions.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from replay import PRECISIONS, Call, Row, assert_calls, cases_of, decode, load_trace, model_of, trace_names

from paradec import samplers
from paradec.protocol import Sampler

NAMES = trace_names("dinfer")
CREDIT = {"credit_alpha": "fusion", "boost_gamma": "exponent", "decay_beta": "decay"}


def is_credit(name: str) -> bool:
    return load_trace(name)["setting"].startswith("credit")


def sampler_of(trace: dict, storage: str) -> Sampler:
    decoder = {key: value for key, value in trace["settings"]["decoder"].items() if key != "use_float64"}
    if storage:
        settings = {CREDIT.get(key, key): value for key, value in decoder.items()}
        return samplers.create("credit", preset="dinfer", storage=storage, **settings)
    return samplers.create("hierarchy" if "low_threshold" in decoder else "threshold", **decoder)


def test_all_traces_are_there() -> None:
    assert len(NAMES) >= 20


def unrolled(rows: list[Row], settings: dict, end: int) -> list[list[Call]]:
    """Our calls as dInfer makes them for the rows of one case, each up to the end of the block where it stops."""
    length, evaluated = settings["block_length"], len(rows[0].final)
    blocks = [row.blocks(length) for row in rows]
    running = [True] * len(rows)
    calls: list[list[Call]] = [[] for _ in rows]
    for block, steps in enumerate(zip(*blocks, strict=True)):
        if not any(running):
            break
        done, taken = 0, max(len(one) for one, runs in zip(steps, running, strict=True) if runs)
        while done < taken:
            left = sum(
                len(call.commits) for one, runs in zip(steps, running, strict=True) if runs for call in one[done:]
            )
            done += min(max(left // settings["expected_tpf"], 1), settings["maximum_unroll"])
        stop = rows[0].prompt + (block + 1) * length
        for row, one, mine in zip(range(len(rows)), steps, calls, strict=True):
            idle = [Call(evaluated, frozenset())] * (done - (len(one) if running[row] else 0))
            mine += (one if running[row] else []) + idle
            if running[row] and any(token == end for call in one for _, token in call.commits):
                running[row] = False
                if settings["early_stop"]:
                    fill = {(at, end) for at in range(stop, evaluated)}
                    mine[-1] = Call(evaluated, mine[-1].commits | fill)
    return calls


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "storage"), [(n, s) for n in NAMES for s in (("dense", "slots") if is_credit(n) else ("",))]
)
def test_trace(name: str, storage: str, precision: str, request: pytest.FixtureRequest) -> None:
    trace = load_trace(name)
    settings, sampler = trace["settings"], sampler_of(trace, storage)
    model = model_of(request, trace, precision)
    arguments = {"block_length": settings["block_length"], "alone": precision == "float32"}
    cases: dict[int, list[Row]] = defaultdict(list)
    for row in decode(model, trace, sampler, **arguments):
        cases[id(row.case)].append(row)
    assert len(cases) == len(cases_of(trace))
    for rows in cases.values():
        for row, calls in zip(rows, unrolled(rows, settings, trace["eos_id"]), strict=True):
            assert_calls(calls, row.theirs, row.where)
            decided = [at for at, token in enumerate(row.final) if token != trace["mask_id"]]
            assert [row.tokens[at] for at in decided] == [row.final[at] for at in decided]
    for row in decode(model, trace, sampler, eos_early_stop=True, **arguments):
        assert row.nfe <= len(row.theirs), row.where
        answer = row.tokens[row.prompt :]
        length = answer.index(trace["eos_id"]) + 1 if trace["eos_id"] in answer else len(answer)
        assert answer[:length] == row.final[row.prompt : row.prompt + length], row.where
