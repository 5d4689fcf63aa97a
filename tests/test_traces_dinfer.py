"""Traces of dInfer's threshold, hierarchy and credit decoders, replayed token for token.

All of them are without dInfer's unrolling (which forwards several times between two looks at the canvas). dInfer stops
after the block that holds an end of text and leaves masks behind it, so what is compared is what it decided: every one
of its steps, exactly. Its comparisons are strict and it takes everything within 1e-5 of the best position with it; on
these traces neither makes a difference. Credit is replayed with both ways to keep it.
"""

from __future__ import annotations

import pytest
import torch
from replay import load_trace, trace_names

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.protocol import Sampler

NAMES = trace_names("dinfer")
CREDIT = {"credit_alpha": "fusion", "boost_gamma": "exponent", "decay_beta": "decay"}


def sampler_of(name: str, decoder: dict, storage: str) -> Sampler:
    if "credit" in name:
        settings = {CREDIT.get(key, key): value for key, value in decoder.items()}
        return samplers.create("credit", preset="dinfer", storage=storage, **settings)
    return samplers.create("hierarchy" if "low_threshold" in decoder else "threshold", **decoder)


def test_all_traces_are_there() -> None:
    assert len(NAMES) == 8


@pytest.mark.parametrize(
    ("name", "storage"), [(n, s) for n in NAMES for s in (("dense", "slots") if "credit" in n else ("",))]
)
def test_trace(name: str, storage: str, llada: Model) -> None:
    trace = load_trace(name)
    decoder, block_length = trace["settings"]["decoder"], trace["settings"]["block_length"]
    assert trace["settings"]["maximum_unroll"] == 1
    sampler = sampler_of(name, decoder, storage)
    cases = [case for case in trace["cases"] if case["fp64_same"]]
    assert len(cases) == 8
    mask = llada.facts.mask_token_id
    for case in cases:
        arguments = {
            "input_ids": torch.tensor(case["prompt_ids"]),
            "sampler": sampler,
            "max_new_tokens": trace["settings"]["gen_length"],
            "block_length": block_length,
        }
        out = paradec.generate(llada, eos_early_stop=False, trace=True, **arguments)
        ours = [{(r, p, t) for r, p, t, _ in step.commits} for step in out.trace.steps]
        theirs = [{tuple(entry) for entry in step["commit"]} for step in case["steps"]]
        assert ours[: len(theirs)] == theirs
        (final,) = case["final_ids"]
        decided = [at for at, token in enumerate(final) if token != mask]
        assert [out.sequences[0, at].item() for at in decided] == [final[at] for at in decided]
        # ours goes on where dInfer stopped, and only there
        left = {position for step in ours[len(theirs) :] for _, position, _ in step}
        assert left == {at for at, token in enumerate(final) if token == mask}
        stopped = paradec.generate(llada, **arguments)
        assert stopped.nfe <= case["nfe"]
        length = stopped.tokens[0]
        prompt = len(case["prompt_ids"][0])
        assert stopped.new_tokens[0, :length].tolist() == final[prompt : prompt + length]
