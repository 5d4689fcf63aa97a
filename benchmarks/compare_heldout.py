"""Settings chosen on one half of the packaged prompts, reported on the other.

    python benchmarks/compare_heldout.py [--batch 20]

benchmarks/results/compare.json measured every setting on 12 prompts of each task; whatever is best there is flattered
by the choice. So each sampler's setting is chosen there - the most tokens per forward among those with at most `FEWER`
right answers less than the baseline - and measured again on 12 other prompts of each task, as are the other settings of
the samplers whose defaults take at most `SLOW` forwards an answer. Writes benchmarks/results/compare_heldout.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from provenance import write_result

from paradec.tools import evaluation
from paradec.tools.evaluation.configuration import COMBINATIONS

RESULTS = Path(__file__).resolve().parent / "results"
FEWER = 4
"""Right answers of 180."""
SLOW = 6.0
"""Forwards an answer; what takes more is left out, for time."""


def chosen(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each sampler's setting, by the choosing half, the baseline first; samplers without a good one at their
    defaults."""

    def right(row: dict[str, Any]) -> int:
        return sum(count for count, _ in row["tasks"].values())

    found: dict[str, dict[str, Any]] = {}
    for sampler in dict.fromkeys(row["sampler"] for row in rows):
        settings = [row for row in rows if row["sampler"] == sampler]
        if settings[0]["nfe"] > SLOW:
            continue
        good = [row for row in settings if right(row) >= right(rows[0]) - FEWER]
        found[sampler] = max(good, key=lambda row: row["tokens_per_forward"], default=settings[0])["changes"]
    return found


def other_questions(per_task: int = 12) -> list[evaluation.Question]:
    """As many prompts of each task as the comparison took, none of them its own."""
    taken = {question.key for question in evaluation.packaged_questions(limit=per_task)}
    every = [question for question in evaluation.packaged_questions() if question.key not in taken]
    found = []
    for task in dict.fromkeys(question.task for question in every):
        own = [question for question in every if question.task == task]
        found += [own[k * len(own) // per_task] for k in range(per_task)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choice = chosen(json.loads((RESULTS / "compare.json").read_text())["results"])
    names = [name for name in choice if name not in COMBINATIONS] + [n for n in COMBINATIONS if n in choice]
    again = evaluation.compare(
        names=names,
        questions=other_questions(),
        batch=arguments.batch,
        progress=lambda comparison, configuration, share: print(f"{share:5.1%} {configuration.name}", flush=True),
    )
    write_result(RESULTS / "compare_heldout.json", {"chosen": choice} | again.to_dict())
    for result in again.results:
        mark = "*" if choice[result.configuration.sampler] == dict(result.configuration.changes) else " "
        print(mark, result.configuration.name, *result.right(), round(result.nfe, 2))


if __name__ == "__main__":
    main()
