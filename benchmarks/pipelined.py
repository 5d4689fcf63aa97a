"""Several open blocks, and branches, beside one block after the other: right answers, forwards, positions evaluated.

    python benchmarks/pipelined.py [--per-task 4] [--batch 20]

The packaged model on packaged prompts that `benchmarks/compare.py` did not choose settings on. Nothing is timed. Writes
benchmarks/results/pipelined.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from compare_heldout import other_questions
from provenance import write_result

import paradec
from paradec import FixedBlocks, PipelinedBlocks, samplers

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK = 8
PIPELINED = PipelinedBlocks(BLOCK)


def settings() -> list[tuple[str, Any, Any, str]]:
    """(name of the sampler, sampler, blocks, cache)."""
    threshold = samplers.create("threshold")
    entropy = samplers.create("entropy_threshold", threshold=0.4)
    active = PipelinedBlocks(BLOCK, forced="active")
    rows: list[tuple[str, Any, Any, str]] = []
    for name, rule in (("threshold 0.9", threshold), ("entropy_threshold 0.4", entropy)):
        rows += [(name, rule, blocks, "none") for blocks in (FixedBlocks(BLOCK), PIPELINED)]
    rows += [("threshold 0.9", threshold, PipelinedBlocks(BLOCK, add=0.5), "none")]
    rows += [("threshold 0.9", threshold, active, "none")]
    rows += [("threshold 0.9", threshold, FixedBlocks(4 * BLOCK), "none")]
    rows += [("threshold 0.9", threshold, blocks, "dual") for blocks in (FixedBlocks(BLOCK), PIPELINED)]
    rows += [("threshold 0.9", threshold, blocks, "delayed") for blocks in (FixedBlocks(BLOCK), PIPELINED)]
    branches = samplers.create("lopa", base=threshold, branches=3)
    rows += [("lopa, 3 branches", branches, blocks, "none") for blocks in (FixedBlocks(BLOCK), PIPELINED)]
    rows += [("lopa, 3 branches", branches, FixedBlocks(4 * BLOCK), "none")]
    return rows


def measure(model: Any, questions: list[Any], sampler: Any, blocks: Any, cache: str, batch: int) -> dict[str, Any]:
    """What all questions took with one setting, per answer."""
    right, nfe, rows, positions = 0, 0, 0, 0
    for at in range(0, len(questions), batch):
        asked = questions[at : at + batch]
        prompts = [question.prompt for question in asked]
        out = paradec.generate(model, prompts, sampler=sampler, blocks=blocks, cache=cache, max_new_tokens=64)
        right += sum(question.right(text) for question, text in zip(asked, out.text, strict=True))
        nfe += sum(out.row_nfe)
        rows += out.row_forwards
        positions += out.forwarded_tokens
    count = len(questions)
    return {
        "right": right,
        "forwards": nfe / count,
        "rows": rows / count,
        "positions": positions / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--per-task", type=int, default=4, choices=(1, 2, 3, 4, 6, 12))
    parser.add_argument("--batch", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = paradec.load()
    questions = other_questions()[:: 12 // arguments.per_task]
    results = []
    for name, sampler, blocks, cache in settings():
        found = measure(model, questions, sampler, blocks, cache, arguments.batch)
        results.append({"sampler": name, "blocks": repr(blocks), "cache": cache} | found)
        print(results[-1], flush=True)
    write_result(RESULTS / "pipelined.json", {"prompts": len(questions), "block": BLOCK, "results": results})


if __name__ == "__main__":
    main()
