"""Compare the preset of `paradec tune` with hand-made settings, on prompts that were not used for choosing.

    python benchmarks/tune.py packaged [--limit 24] [--trials N]
    python benchmarks/tune.py antibody [--chains 64] [--skip 0] [--trials N]

`packaged`: the small text model, prompts of all tasks. `antibody`: AntiBERTy, the sequences of benchmarks/data, with 90
% of the residues masked (the masks of benchmarks/antibody.py for seed 0). The prompts are divided into a choosing half
and a reported half; the two chains of an antibody are in the same half. `paradec tune` chooses on the choosing half.

Hand-made settings are those of docs/tables/compare.csv: defaults and `sweep` of the samplers whose defaults take at
most `SLOW` forwards per position. They are measured on both halves. Two are chosen by the same rule, the fewest
forwards among scores at most a point below the best: `fair` on the choosing half, `oracle` on the reported half, which
a user cannot know; a third one has the best score there. The preset is compared with each by paired bootstraps.

Writes rows of these three on the reported half, and those of `summary`, to benchmarks/results/tune_*.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from provenance import RESULTS, write_result

import paradec
from paradec.tools import evaluation
from paradec.tools.evaluation import Configuration, configurations
from paradec.tools.evaluation.metrics import bootstrap
from paradec.tools.evaluation.questions import Question
from paradec.tools.tuning import Tuning
from paradec.tools.tuning.prompts import split_halves, to_questions
from paradec.tools.tuning.scoring import PromptHalf, Scorer

SLOW = {"packaged": 0.1, "antibody": 0.3}
"""Maximum forwards per undecided position of a sampler's defaults; slower samplers are left out, to save time."""
TOLERANCE = 0.01


def measure_hand_made(
    model: Any,
    questions: Sequence[Question],
    positions: int,
    blocks: int,
    slowest: float,
    names: Sequence[str] | None = None,
    **request: Any,
) -> list[dict[str, Any]]:
    """Measure all hand-made settings on these questions: score (share of right tokens or answers), and forwards.
    Samplers whose defaults take more than `slowest` forwards per position (of `positions`) are left out."""
    half, rows = PromptHalf("hand", model, questions, None, None), []
    slow: set[str] = set()
    for configuration in configurations(names):
        if configuration.sampler in slow:
            continue
        try:
            method = configuration.make()
            steps = configuration.request(positions, blocks)
            if method.uses_steps and not steps and configuration.sampler in paradec.samplers.registry:
                continue  # `paradec tune` measures one token per step
            method.start(model, half.prompts.slice_rows(0, 1), paradec.Request(**request, **steps, sampler=method))
            asking = paradec.Request(**request, **steps, sampler=method, seed=0)
            first = half.measure(asking, 0, min(8, len(half)), 8, Scorer("answers"), {})
            if not configuration.changes and first.mean("forwards") > slowest * positions:
                slow.add(configuration.sampler)
                continue
            first.add(half.measure(asking, len(first), len(half), 8, Scorer("answers"), {}))
        except ValueError as error:
            print(f"{configuration.name} is left out: {error}", file=sys.stderr)
            continue
        rows.append(row(configuration, first))
        print(f"{configuration.name}: {rows[-1]['score']:.3f} in {rows[-1]['forwards']:.2f}", flush=True)
    return rows


def row(configuration: Configuration, measured: Any) -> dict[str, Any]:
    return {
        "name": configuration.name,
        "score": measured.mean("score"),
        "forwards": measured.mean("forwards"),
        "scores": measured.score,
        "forwards_each": measured.forwards,
    }


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Select the row with the fewest forwards among rows at most a point below the best score."""
    least = max(entry["score"] for entry in rows) - TOLERANCE - 1e-9
    return min((entry for entry in rows if entry["score"] >= least), key=lambda entry: entry["forwards"])


def compare(
    tuning: Tuning, model: Any, first: list[Question], second: list[Question], **more: Any
) -> list[dict[str, Any]]:
    """Build the rows of `summary`, and rows of the chosen hand-made settings on the reported half (`second`), with the
    preset's gain over each. `first` is the choosing half; `more` are arguments of `measure_hand_made`."""
    choosing, reported = (measure_hand_made(model, half, **more) for half in (first, second))
    fair = choose(choosing)["name"]
    chosen_rows = {
        "fair": next(entry for entry in reported if entry["name"] == fair),
        "oracle": choose(reported),
        "best score": max(reported, key=lambda entry: entry["score"]),
    }
    chosen = tuning.points[tuning.chosen or 0].reported
    rows = summary(tuning)
    for label, entry in chosen_rows.items():
        values = [a - b for a, b in zip(tuning.score(chosen), entry["scores"], strict=True)]
        difference = [sum(values) / len(values), *bootstrap(values, tuning.groups)]
        rows.append(
            {key: entry[key] for key in ("name", "score", "forwards")} | {"row": label, "tuned_minus": difference}
        )
    return rows


def summary(tuning: Tuning) -> list[dict[str, Any]]:
    """Build rows: the reference (with the preset's gain over it), the baseline and the preset (reported half)."""
    data, chosen = tuning.to_dict(), tuning.points[tuning.chosen or 0]
    point = data["points"][tuning.chosen or 0]
    rows = []
    for row, name, measured in (
        ("one token per step", "", data["reference"]),
        ("baseline", data["default"]["name"], data["default"]["reported"]),
        ("tuned", point["name"], point["reported"]),
    ):
        rows.append({"row": row, "name": name} | {key: measured[key] for key in ("score", "interval", "forwards")})
    rows[0]["tuned_minus"] = list(tuning.difference(chosen.reported, tuning.reference))
    return rows


def packaged(options: argparse.Namespace) -> dict[str, Any]:
    model, questions = paradec.load(), evaluation.packaged_questions(limit=options.limit)
    tuning = run_tune(model, questions, options)
    first, second = split_halves(to_questions(questions), 0)
    sizes = {"positions": model.default_max_new_tokens, "blocks": 2, "slowest": SLOW["packaged"]}
    rows = compare(tuning, model, first, second, **sizes)
    return {"trials": tuning.trials, "rows": rows}


def antibody(options: argparse.Namespace) -> dict[str, Any]:
    from antibody import LEFT_OUT, CachedModel, build_questions, read_chains, select_usable
    from antibody_model import load_antiberty

    real = load_antiberty()
    model = CachedModel(real)
    questions, special = build_questions(real, read_chains()[options.skip : options.skip + options.chains])
    fit = select_usable(real, [[real.facts.mask_token_id]], configurations(), LEFT_OUT, paradec.samplers.names())
    names = list(dict.fromkeys(configuration.sampler for configuration in fit))
    tuning = run_tune(model, questions, options, samplers=names, suppress_tokens=special)
    first, second = split_halves(questions, 0)
    positions = round(sum(len(entry.truth or ()) for entry in questions) / len(questions))
    more = {"positions": positions, "blocks": 1, "slowest": SLOW["antibody"], "names": names}
    rows = compare(tuning, model, first, second, **more, suppress_tokens=special)
    return {"trials": tuning.trials, "rows": rows}


def run_tune(model: Any, prompts: Any, options: argparse.Namespace, **more: Any) -> Tuning:
    begin, cpu = time.monotonic(), time.process_time()
    tuning = paradec.tune(
        model,
        prompts,
        trials=options.trials,
        batch=8,
        progress=lambda what, share: print(f"{share:5.1%} {what}", flush=True),
        **more,
    )
    print(tuning)
    print(f"{time.monotonic() - begin:.0f} s, {time.process_time() - cpu:.0f} s of the CPU")
    return tuning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("packaged", "antibody"))
    parser.add_argument("--limit", type=int, default=24, help="prompts of each task")
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--skip", type=int, default=0, help="number of chains to skip at the beginning of the file")
    parser.add_argument("--trials", type=int, default=40, help="proposed settings, besides the hand-made ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"packaged": packaged, "antibody": antibody}[options.part](options)
    others = f"_from_{options.skip}" if options.skip else ""
    machine = {"threads": 1, "torch": torch.__version__, "device": "cpu"}
    write_result(RESULTS / f"tune_{options.part}{others}.json", {"machine": machine} | result)


if __name__ == "__main__":
    main()
