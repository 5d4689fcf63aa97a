"""Right answers and forwards of the packaged model without and with a constraint.

    python benchmarks/constrained.py [--limit 48]

The constraint of a task is built from the prompt alone. For `sort`, `reverse` and `shuffle` it is a choice among all
orders of the prompt's words, for `latin_square` a pattern of rows of the prompt's words.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

import paradec
from paradec.constraints.values import Constraint
from paradec.tools.evaluation.tasks import get_task, load_prompts

WAYS: dict[str, dict[str, Any]] = {
    "one token per step": {"sampler": "low_confidence"},
    "threshold": {"sampler": "threshold"},
    "all at once": {"sampler": "low_confidence", "steps": 1},
}


def constraint_of(task: str, items: list[str]) -> Constraint:
    """Build the constraint of a task's answers from the words of the prompt."""
    if task == "latin_square":
        row = " ".join(["(" + "|".join(items) + ")"] * len(items))
        return paradec.Regex("\n".join([row] * len(items)))
    return paradec.Choice([" ".join(order) for order in itertools.permutations(items)])


def compare_answers(limit: int) -> None:
    """Print the share of right answers and the mean forwards of each task and sampler, without -> with constraint."""
    model = paradec.load()
    for name in ("sort", "reverse", "shuffle", "latin_square"):
        task, examples = get_task(name), load_prompts(name, limit)
        for way, request in WAYS.items():
            results = []
            for is_constrained in (False, True):
                prompts = [
                    {"prompt": example.prompt}
                    | ({"constraint": constraint_of(name, [*example.items])} if is_constrained else {})
                    for example in examples
                ]
                outputs = list(paradec.generate_many(model, prompts, max_new_tokens=64, block_length=64, **request))
                right = sum(task.check(example, out.text) for example, out in zip(examples, outputs, strict=True))
                results.append((100 * right / len(examples), sum(out.nfe for out in outputs) / len(outputs)))
            line = " -> ".join(f"{share:5.1f} % in {forwards:4.1f} forwards" for share, forwards in results)
            print(f"{name:14} {way:18} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=48, help="prompts of each task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compare_answers(arguments.limit)


if __name__ == "__main__":
    main()
