"""Traces of the public cached decoders, replayed: dKV-Cache, Fast-dLLM's and AdaBlock's prefix and dual caches.

Compared are the cases that are the same in float64: the final tokens, the number of forwards, and call for call how
many positions were evaluated. For rules without near-ties, also what every call committed.

What differs from the references, and why:
- `dkv/decode_*_random`: the public code draws random numbers for the evaluated positions alone; a sampler does not know
  these, so the test replays it with a sampler of its own.
- `dkv-dream/decoded_*_right`: the public code commits tokens from logits that it does not have (0 of 8 answers right).
  Ours commits only what was evaluated, and evaluates a row whole when nothing else is left; the forwards are compared.
- `*_batch2` of the threshold rule: the public code keeps a row that has filled its block in the calls until the others
  have; tokens and forwards are compared.
- Caches of Fast-dLLM and AdaBlock for Dream commit the first token of a block unasked. Compared by right answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from replay import GOLDEN, load_trace, request_of, trace_names
from torch import Tensor

import paradec
from paradec import caches, samplers
from paradec.models.adapter import Model
from paradec.samplers.masked_state import MaskedState
from paradec.samplers.random import Random

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

CASES = None if os.environ.get("PARADEC_ALL_TRACES") else 1
"""Of each file, to keep the suite short; PARADEC_ALL_TRACES=1 replays them all."""


@dataclass(frozen=True)
class RandomOverEvaluated(Random):
    """Draws numbers for what the cache has evaluated, in ascending order, as dKV-Cache's code does."""

    def _position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        (part,) = state.cache.plan(state)
        evaluated = torch.as_tensor(part.positions)
        noise = torch.zeros(state.canvas.shape, dtype=torch.float64)
        noise.scatter_(1, evaluated, torch.rand(evaluated.shape, generator=generator).double())
        return state.window.read(noise)


def dkv(trace: dict) -> tuple[Any, dict]:
    settings = trace["settings"]
    request = {name: settings[name] for name in ("temperature", "block_length", "steps")}
    greedy = settings["variant"] == "greedy"
    if not settings["enable_cache"]:
        cache: Any = "none"
    elif greedy:
        cache = caches.create(
            "dkv_greedy", refresh_interval=settings["cache_reloading_step"], window=settings["window_size"]
        )
    else:
        cache = caches.create("dkv_decode", refresh_interval=settings["cache_reloading_step"])
    if greedy:
        sampler = samplers.create("random", order="block")
    else:
        sampler = RandomOverEvaluated() if settings["remasking"] == "random" else samplers.create("low_confidence")
    return sampler, request | {"cache": cache}


def dkv_dream(trace: dict) -> tuple[Any, dict]:
    settings = trace["settings"]
    sampler = samplers.create(settings["alg"], eps=settings["eps"], alg_temp=settings["alg_temp"])
    request = {name: settings[name] for name in ("temperature", "steps", "top_p", "top_k")}
    if not settings["use_cache"]:
        return sampler, request
    if settings["cache_type"] == "prefill":
        return sampler, request | {"cache": "dkv_prefill"}
    name = {"decoded": "dkv_decode", "pd": "dkv_pd"}[settings["cache_type"]]
    given = {"refresh_interval": settings["cache_steps"], "shift_type": settings["shift_type"]}
    return sampler, request | {"cache": caches.create(name, **given)}


def fastdllm(trace: dict) -> tuple[Any, dict]:
    sampler, request = request_of(trace)
    return sampler, request | {"cache": trace["setting"].partition("_")[0]}


def fastdllm_dream(trace: dict) -> tuple[Any, dict]:
    settings = trace["settings"]
    request = {"block_length": settings["block_length"], "cache": trace["setting"].partition("_")[0]}
    if settings["alg"] == "confidence_threshold":
        return samplers.create("threshold", threshold=settings["threshold"]), request
    return samplers.create(settings["alg"], eps=settings["eps"]), request | {"steps": settings["steps"]}


def adablock(trace: dict) -> tuple[Any, dict]:
    settings = trace["settings"]
    sampler = samplers.create(
        "adablock",
        threshold=settings["threshold"],
        init_block_length=settings.get("init_block_length", settings.get("block_length")),
        delimiter_threshold=settings["delimiter_threshold"],
        delimiters=tuple(settings["delimiter_ids"]),
    )
    return sampler, {"cache": "prefix" if trace["setting"].startswith("prefix") else "dual"}


def replay(model: Model, case: dict, sampler: Any, request: dict) -> Any:
    prompts = torch.tensor(case["prompt_ids"])
    new = len(case["final_ids"][0]) - prompts.shape[1]
    options = {"seed": case["seed"], "rng": "reference", "eos_early_stop": False, "trace": True}
    return paradec.generate(model, input_ids=prompts, sampler=sampler, max_new_tokens=new, **options, **request)


def cases_of(trace: dict) -> list[dict]:
    return [case for case in trace["cases"] if case["fp64_same"]][:CASES]


@pytest.mark.parametrize("name", trace_names("dkv", "dkv-dream", "fastdllm-cached") + trace_names("adablock-cached"))
def test_trace(name: str, request: pytest.FixtureRequest) -> None:
    trace = load_trace(name)
    if trace["method"] == "adablock-dream":
        pytest.skip("compared by right answers")
    model = request.getfixturevalue(trace["model"].removesuffix("-tiny"))
    convert: Callable = {"dkv": dkv, "dkv-dream": dkv_dream, "fastdllm": fastdllm, "adablock": adablock}[
        trace["method"]
    ]
    sampler, arguments = convert(trace)
    missing_logits = trace["settings"].get("shift_type") == "right"
    moves_on = trace["batch_size"] > 1 and trace["settings"].get("threshold") is not None
    by_rule = trace["settings"].get("threshold") is not None or trace["settings"].get("factor") is not None
    for case in cases_of(trace):
        out = replay(model, case, sampler, arguments)
        assert out.nfe == case["nfe"]
        if missing_logits:
            continue
        assert out.sequences.tolist() == case["final_ids"]
        if moves_on:
            continue
        for ours, theirs in zip(out.trace.steps, case["steps"], strict=True):
            assert ours.forwarded == [theirs["input_shape"][1]] * len(ours.forwarded)
            if by_rule or trace["settings"].get("remasking") == "random":
                assert [list(commit[:3]) for commit in ours.commits] == theirs["commit"]


def test_there_are_partial_calls_in_every_cached_trace() -> None:
    """The widths compared above are not all those of whole rows."""
    for name in trace_names("dkv", "dkv-dream", "fastdllm-cached", "adablock-cached"):
        trace = load_trace(name)
        if "nocache" in name or name.endswith("dual_factor1.0_bl32"):
            continue
        widths = {step["input_shape"][1] for case in trace["cases"] for step in case["steps"]}
        assert len(widths) > 1, name


@pytest.mark.parametrize("name", [*trace_names("fastdllm-dream-cached"), "adablock-cached/dream_dual_default_init16"])
def test_forced_first_token_by_answers(name: str, dream: Model) -> None:
    """Not worse than the public code, which forces the first token of a block, by more than one of its answers."""
    trace = load_trace(name)
    sampler, arguments = (adablock if "adablock" in name else fastdllm_dream)(trace)
    strings = json.loads((GOLDEN / "dream-tiny" / "tokenizer_table.json").read_text())["table"]
    end = dream.facts.eos_token_ids[0]
    ours = theirs = 0
    for case in trace["cases"]:
        out = replay(dream, case, sampler, arguments)
        tokens = [*out.new_tokens[0].tolist(), end]
        text = "".join(strings[token] for token in tokens[: tokens.index(end)])
        ours += text == case["answer"][0]
        theirs += case["correct"][0]
    assert ours >= theirs - 1
