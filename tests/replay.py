"""Reading the traces of the public reference implementations, and comparing ours with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import paradec

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


def load_trace(name: str) -> dict:
    """A trace file by "method/setting"."""
    return json.loads((GOLDEN / "traces" / f"{name}.json").read_text())


def trace_names(*methods: str) -> list[str]:
    """All "method/setting" names of the given methods."""
    return sorted(f"{m}/{p.stem}" for m in methods for p in (GOLDEN / "traces" / m).glob("*.json"))


def compare(model: paradec.models.Model, case: dict, setting: str, sampler: object, **request: object) -> Comparison:
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
    )
