"""`paradec compare` and `paradec bench parallel` on the packaged prompts, and chosen settings on other prompts.

    python benchmarks/compare_heldout.py [--parts compare heldout parallel] [--batch 20]

`compare` measures every setting on 12 prompts of each task. A setting chosen by these results looks better than it is;
`heldout` therefore measures again on 12 other prompts of each task. Of a sampler's settings that lose at most
`MAX_LOSS` right answers to the baseline, the one with the most tokens per forward in `compare` is chosen. Samplers
whose defaults take more than `SLOW` forwards are left out. `parallel` is ParallelBench's sweep, 16 prompts per task.
Writes compare.json, compare_heldout.json and parallel.json in benchmarks/results, and draws docs/figures/compare.svg
and parallel.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from provenance import RESULTS, read_result, write_result

from paradec.core.registry import to_data
from paradec.tools import evaluation
from paradec.tools.evaluation.configuration import COMBINATIONS
from paradec.tools.evaluation.metrics import wilson
from paradec.tools.evaluation.parallel import parallel
from paradec.tools.evaluation.plot import frontier
from paradec.tools.evaluation.questions import Question

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
MAX_LOSS = 4
"""Maximum number of right answers, of 180, that a chosen setting may lose to the baseline."""
SLOW = 6.0
"""Maximum forwards per answer of a sampler's defaults; slower samplers are left out, to save time."""


def published(comparison: Any) -> dict[str, Any]:
    """Reduce a comparison to the published result: a row for each setting."""
    rows = []
    for result in comparison.results:
        row = {
            "sampler": result.configuration.sampler,
            "changes": {name: to_data(value) for name, value in result.configuration.changes.items()},
            "one_answer": list(result.right(comparison.group(False))),
            "many_answers": list(result.right(comparison.group(True))),
            "interval": list(wilson(*result.right())),
            "forwards": result.nfe,
            "padding_forwards": result.padding_forwards,
            "tokens_per_forward": result.tokens_per_forward,
        }
        rows.append(row)
    return {"setup": comparison.setup, "machine": comparison.machine, "aup": comparison.aup(), "results": rows}


def count_right(row: dict[str, Any]) -> int:
    """Count the right answers of a row, for prompts with one answer and with many."""
    return int(row["one_answer"][0] + row["many_answers"][0])


def choose_settings(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Choose the best setting of each sampler; rows[0] is the baseline. A sampler without a good enough setting gets
    its defaults; samplers with slow defaults are left out."""
    changes: dict[str, dict[str, Any]] = {}
    for sampler in dict.fromkeys(row["sampler"] for row in rows):
        settings = [row for row in rows if row["sampler"] == sampler]
        if settings[0]["forwards"] > SLOW:
            continue
        good = [row for row in settings if count_right(row) >= count_right(rows[0]) - MAX_LOSS]
        changes[sampler] = max(good, key=lambda row: row["tokens_per_forward"], default=settings[0])["changes"]
    return changes


def other_questions(per_task: int = 12) -> list[Question]:
    """Select `per_task` prompts of each task that the comparison did not use."""
    packaged_keys = {question.key for question in evaluation.packaged_questions(limit=per_task)}
    every = [question for question in evaluation.packaged_questions() if question.key not in packaged_keys]
    questions = []
    for task in dict.fromkeys(question.task for question in every):
        of_task = [question for question in every if question.task == task]
        questions += [of_task[k * len(of_task) // per_task] for k in range(per_task)]
    return questions


def show_progress(comparison: Any, configuration: Any, share: float) -> None:
    print(f"{share:5.1%} {configuration.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ("compare", "heldout", "parallel")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--batch", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    request: dict[str, Any] = {"batch": arguments.batch, "progress": show_progress}
    if "compare" in arguments.parts:
        comparison = evaluation.compare(questions=evaluation.packaged_questions(limit=12), **request)
        write_result(RESULTS / "compare.json", published(comparison))
        frontier(comparison, FIGURES / "compare.svg")
    if "heldout" in arguments.parts:
        choice = choose_settings(read_result(RESULTS / "compare.json")["results"])
        names = [name for name in choice if name not in COMBINATIONS] + [n for n in COMBINATIONS if n in choice]
        comparison = evaluation.compare(names=names, questions=other_questions(), **request)
        write_result(RESULTS / "compare_heldout.json", {"chosen": choice} | published(comparison))
    if "parallel" in arguments.parts:
        comparison = parallel(limit=16, max_new_tokens=24, **request)
        write_result(RESULTS / "parallel.json", published(comparison))
        frontier(comparison, FIGURES / "parallel.svg")


if __name__ == "__main__":
    main()
