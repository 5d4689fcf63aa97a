"""Samplers on a small block-causal model: thresholds, credit, and drafts that the model verifies itself.

    python examples/train_tiny_blocks.py --out runs/tiny-blocks --minutes 15.4
    PYTHONPATH=examples python benchmarks/self_verified.py runs/tiny-blocks [--out FILE] [--limit 12]

For each sampler the setting with the fewest forwards that loses at most one answer in 50 to the best setting of all is
chosen on one half of the prompts ("equal": none does, where it is false: then its best one), and measured on the other:
right answers, forwards and positions per answer, and CPU time per answer, in turns with the others (quartiles).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import write_result
from train_tiny_blocks import BLOCK, LEFT_OUT, load_blocks

import paradec
from paradec.tools.evaluation.tasks import TASKS, load_prompts

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "token by token": [{"sampler": "self_speculative", "window": 1}],
    "one a step": [{"sampler": "low_confidence"}],
    "threshold": [{"sampler": "threshold", "threshold": value} for value in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)],
    "credit": [{"sampler": "credit", "threshold": value} for value in (0.6, 0.7, 0.8, 0.9, 0.95)],
    "s2d2": [
        *({"sampler": "s2d2", "cost": cost, "threshold": value} for cost in (0.0, 1.0, 4.0) for value in (0.7, 0.85)),
        *({"sampler": "s2d2", "route": "span", "min_span": value} for value in (1, 2, 4)),
        {"sampler": "s2d2", "cost": 4.0, "threshold": 0.85, "causal": False},
        {"sampler": "s2d2", "block_steps": 4},
    ],
    "self_speculative": [{"sampler": "self_speculative", "window": value} for value in (3, 5, 8)],
}
NEW = 48
TOLERANCE = 0.02
"""Share of answers that a setting may lose."""


def answers(model: Any, examples: list[Any], setting: dict[str, Any]) -> dict[str, Any]:
    """Right answers, forwards and positions per answer, those that draft with them, CPU seconds per answer, decoded one
    by one."""
    given = dict(setting)
    sampler = paradec.samplers.create(given.pop("sampler"), **given)
    cache = {} if sampler.family == "draft_verify" else {"cache": "block"}
    right, nfe, positions, began = 0, 0, 0, time.process_time()
    for example in examples:
        messages = [{"role": "user", "content": example.prompt}]
        out = paradec.generate(model, messages, sampler=sampler, max_new_tokens=NEW, temperature=0, seed=0, **cache)
        right += TASKS[example.task].check(example, out.text)
        (drafts,) = out.draft_nfe or (0,)
        nfe += out.nfe + drafts
        positions += out.forwarded_tokens + drafts * setting.get("window", BLOCK)
    count = len(examples)
    return {
        "right": right / count,
        "forwards": nfe / count,
        "positions": positions / count,
        "cpu_seconds": (time.process_time() - began) / count,
    }


def main() -> None:
    """Choose, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "self_verified.json")
    parser.add_argument("--limit", type=int, default=12, help="prompts of a task, half of them to choose settings")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_blocks(options.model)
    kept = load_prompts([name for name in TASKS if name not in LEFT_OUT], options.limit)
    halves: list[list[Any]] = [[], []]
    for task in dict.fromkeys(example.task for example in kept):
        own = [example for example in kept if example.task == task]
        halves[0] += own[0::2]
        halves[1] += own[1::2]
    tried: dict[str, list[Any]] = {}
    for name, settings in SETTINGS.items():
        tried[name] = [{"setting": setting, **answers(model, halves[0], setting)} for setting in settings]
        print(name, *tried[name], sep="\n  ", flush=True)
    least = max(each["right"] for found in tried.values() for each in found) - TOLERANCE
    chosen, equal = {}, {}
    for name, found in tried.items():
        good = [each for each in found if each["right"] >= least]
        equal[name] = bool(good)
        good = good or [max(found, key=lambda each: each["right"])]
        chosen[name] = min(good, key=lambda each: each["forwards"])["setting"]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for _ in range(options.turns):
        for name, setting in chosen.items():
            turns[name].append(answers(model, halves[1], setting))
    measured = {}
    for name, found in turns.items():
        spread = np.quantile([each["cpu_seconds"] for each in found], (0.25, 0.5, 0.75)).tolist()
        measured[name] = {"setting": chosen[name], "equal": equal[name], **found[0], "cpu_seconds": spread}
        print(name, measured[name], flush=True)
    prompts = {"chosen_on": len(halves[0]), "measured_on": len(halves[1]), "max_new_tokens": NEW}
    machine = {"load": os.getloadavg()[0], "torch": torch.__version__, "threads": 1}
    write_result(options.out, {"prompts": prompts, "machine": machine, "measured": measured, "tried": tried})


if __name__ == "__main__":
    main()
