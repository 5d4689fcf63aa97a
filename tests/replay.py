"""Reading the traces of the public reference implementations, and comparing ours with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import paradec
from paradec.models.adapter import Model

GOLDEN = Path(__file__).parent / "golden"


@dataclass
class Comparison:
    """How one case went. Steps are sets of (row, position, token)."""

    setting: str
    tokens_equal: bool
    nfe: int
    reference_nfe: int
    steps_equal: int
    steps: int
    rows_equal: bool
    """Whether each row committed the same sets in the same order, steps that commit nothing left out."""
    only_empty_left: bool
    """Whether the reference committed nothing after our last step."""


def load_trace(name: str) -> dict:
    """A trace file by "method/setting"."""
    return json.loads((GOLDEN / "traces" / f"{name}.json").read_text())


def trace_names(*methods: str) -> list[str]:
    """All "method/setting" names of the given methods."""
    return sorted(f"{m}/{p.stem}" for m in methods for p in (GOLDEN / "traces" / m).glob("*.json"))


def request_of(trace: dict) -> tuple[paradec.protocol.Sampler, dict]:
    """Our sampler and request for the settings of a trace of LLaDA, Dream or Fast-dLLM (without cache)."""
    method, settings = trace["method"], trace["settings"]
    request = {"temperature": settings["temperature"], "guidance_scale": 1 + settings.get("cfg_scale", 0.0)}
    create = paradec.samplers.create
    if method in ("llada", "fastdllm"):
        request["block_length"] = settings["block_length"]
        if settings.get("threshold") is not None:
            return create("threshold", threshold=settings["threshold"]), request
        if settings.get("factor") is not None:
            return create("factor", factor=settings["factor"], reference_last_rank=True), request
        request["steps"] = settings["steps"]
        return create(settings["remasking"]), request
    request |= {"steps": settings["steps"], "top_p": settings["top_p"], "top_k": settings["top_k"]}
    if method == "fastdllm-dream":
        return create("threshold", threshold=settings["threshold"], quota_per_step="carry"), request
    extra = {} if settings["alg"] == "origin" else {"alg_temp": settings["alg_temp"]}
    return create(settings["alg"], eps=settings["eps"], **extra), request


def compare(model: Model, case: dict, setting: str, sampler: object, **request: object) -> Comparison:
    """Decode a case's prompts and compare tokens, forwards and what each step committed."""
    out = paradec.generate(
        model,
        input_ids=torch.tensor(case["prompt_ids"]),
        sampler=sampler,
        max_new_tokens=len(case["final_ids"][0]) - len(case["prompt_ids"][0]),
        seed=case["seed"],
        rng="reference",
        eos_early_stop=False,
        trace=True,
        **request,
    )
    ours = [{(r, p, t) for r, p, t, _ in step.commits} for step in out.trace.steps]
    theirs = [{tuple(entry) for entry in step["commit"]} for step in case["steps"]]
    return Comparison(
        setting=setting,
        tokens_equal=out.sequences.tolist() == case["final_ids"],
        nfe=out.nfe,
        reference_nfe=case["nfe"],
        steps_equal=sum(a == b for a, b in zip(ours, theirs, strict=False)),
        steps=max(len(ours), len(theirs)),
        rows_equal=all(_of_row(ours, row) == _of_row(theirs, row) for row in range(len(case["prompt_ids"]))),
        only_empty_left=not any(theirs[len(ours) :]),
    )


def _of_row(steps: list[set[tuple[int, int, int]]], row: int) -> list[set[tuple[int, int, int]]]:
    found = [{entry for entry in step if entry[0] == row} for step in steps]
    return [step for step in found if step]
