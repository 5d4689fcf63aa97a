"""Savings of parallel decoding over a baseline that decodes no padding.

    python benchmarks/headline.py [--batch 20]

A sampler that commits a fixed number of tokens per step fills whole blocks. The packaged model's answers have 7.6
tokens on average, so in blocks of 32 most forwards only commit padding. This benchmark runs every such sampler with
one, two or four tokens per step in blocks of several lengths, and with one token per step also in blocks that end where
the model predicts the end of the text. On the prompts of benchmarks/results/compare.json, each sampler's setting with
the fewest forwards is chosen among those with at most `MAX_LOSS` fewer right answers than `threshold` at its defaults.
It is then measured on the other prompts of benchmarks/compare_heldout.py. The block length of the baseline, one token
per step, is chosen in the same way.

Writes benchmarks/results/headline.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from compare_heldout import MAX_LOSS, other_questions, show_progress
from provenance import COMMIT, RESULTS, write_result

import paradec
from paradec import AdaptiveBlocks
from paradec.tools import evaluation
from paradec.tools.evaluation import Configuration
from paradec.tools.evaluation.metrics import wilson

BLOCKS = (1, 2, 4, 8, 16, 32)
TOKENS = (1, 2, 4)
"""Numbers of tokens per step."""
BASELINE = "low_confidence"
"""Commits the most confident token at each step."""
SCHEDULES = (BASELINE, *"random origin maskgit_plus topk_margin entropy margin maskgit halton recap".split())
"""Samplers that commit a number of tokens per step that the request's `steps` fixes."""


def candidates(sampler: str, end: int) -> list[Configuration]:
    """List a sampler's configurations; `end` is the end token's id. Only the baseline gets all of `BLOCKS`."""
    entries = []
    lengths = BLOCKS if sampler == BASELINE else (4, 8, 16)
    for tokens in TOKENS:
        steps = {} if tokens == 1 else {"steps": 1 / tokens}
        entries += [Configuration(sampler, steps | {"block_length": block}) for block in lengths if block >= tokens]
    return [*entries, Configuration(sampler, {"blocks": AdaptiveBlocks(32, delimiters=(end,))})]


def to_row(result: Any) -> dict[str, Any]:
    right, total = result.right()
    changes = dict(result.configuration.changes)
    if "blocks" in changes:
        changes["blocks"] = "end at the end token"
    entry = {"sampler": result.configuration.sampler, "changes": changes, "right": right, "of": total}
    entry |= {"interval": list(wilson(right, total)), "forwards": result.nfe, "commit": COMMIT}
    return entry | {"padding_forwards": result.padding_forwards / total, "tokens": result.tokens / total}


def best(rows: list[dict[str, Any]], least: int) -> dict[str, Any]:
    """Select the row with the fewest forwards among those with at least `least` right answers; ties go to the most
    right answers."""
    return min((row for row in rows if row["right"] >= least), key=lambda row: (row["forwards"], -row["right"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = paradec.load()
    (end,) = model.facts.eos_token_ids
    questions = evaluation.packaged_questions(limit=12)

    def measure(configurations: list[Configuration], prompts: Any) -> list[dict[str, Any]]:
        shared = {"batch": arguments.batch, "progress": show_progress}
        comparison = evaluation.compare(model, names=configurations, questions=prompts, **shared)
        return [to_row(result) for result in comparison.results]

    choosing = measure([configuration for name in SCHEDULES for configuration in candidates(name, end)], questions)
    least = choosing[0]["right"] - MAX_LOSS  # `compare` puts `threshold` first
    baseline_rows = [row for row in choosing if row["sampler"] == BASELINE and "steps" not in row["changes"]]
    best_rows = [best(baseline_rows, least)]
    for name in SCHEDULES:
        of_sampler = [row for row in choosing[1:] if row["sampler"] == name]
        if any(row["right"] >= least for row in of_sampler):
            best_rows.append(best(of_sampler, least))
    policies = {"end at the end token": AdaptiveBlocks(32, delimiters=(end,))}
    chosen = []
    for best_row in sorted(best_rows, key=lambda row: "blocks" in row["changes"]):
        changes = {name: policies.get(value, value) for name, value in best_row["changes"].items()}
        chosen.append(Configuration(best_row["sampler"], changes))
    chosen.append(Configuration(BASELINE, {"block_length": 32}))  # the cost of filling whole blocks
    reporting = measure(chosen, other_questions())
    result = {"baseline": best_rows[0]["changes"], "fewer": MAX_LOSS, "choosing": choosing, "reporting": reporting}
    write_result(RESULTS / "headline.json", result)
    for row in reporting:
        print(row["sampler"], row["changes"], row["right"], round(row["forwards"], 2), round(row["tokens"], 2))


if __name__ == "__main__":
    main()
