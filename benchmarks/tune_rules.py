"""Which rule of choice holds on prompts that chose nothing: random halves of rows that were measured anyway.

    python benchmarks/tune_rules.py [--draws 300]

Rows are those of benchmarks/results/antibody.json under the masks of its later seeds (AntiBERTy, 80 fillings; the first
seed's are what benchmarks/tune.py reports), once with half of the antibodies choosing and once with every second of
their fillings, and the rows made by hand of tune_packaged.json, both of its halves together (180 prompts, forwards by
their means). In every draw the halves are new, and of the rows a random 60 % count as made by hand, the others as what
a search proposed.

Rules, on the half that chooses:

    anchored   the fewest forwards at most a point below `threshold`, or below what a paired interval separates from it
    best       the fewest forwards at most a point below the best score of all rows
    by hand    the same of the rows made by hand alone: what the others are compared with
    by mean    by hand, or what takes fewer forwards and scores no less
    interval   by mean, and the paired interval ends at most a point below: `paradec.tools.tuning.result.choose`

Reported of each on the other half: score and forwards, and how often it is at most a point below the row taken by hand
there in no more forwards. No model is run. Writes benchmarks/results/tune_rules.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from antibody import read_chains
from provenance import write_result

from paradec.request import Request
from paradec.tools.evaluation import Configuration
from paradec.tools.evaluation.configuration import BASELINE
from paradec.tools.tuning.measuring import Measured
from paradec.tools.tuning.result import Point, choose, paired
from paradec.tools.tuning.space import Candidate

RESULTS = Path(__file__).resolve().parent / "results"
POINT = 0.01
BY_HAND = 0.6
SEED = 0
Rows = dict[str, tuple[np.ndarray, np.ndarray]]
"""By name: [prompts] scores, and forwards."""


def antibodies() -> tuple[Rows, list[str]]:
    """Rows that were filled under all later seeds, and the antibody of every filling."""
    data = json.loads((RESULTS / "antibody.json").read_text(encoding="utf-8"))
    masked = {(chain.name, seed): len(chain.masked(seed)) for chain in read_chains() for seed in range(1, 5)}
    rows, fillings = {}, []
    for row in data["results"]:
        done = {(chain, seed): (right, forwards) for chain, seed, right, forwards in row["done"] if seed}
        fillings = fillings or sorted(done)
        if len(done) == len(fillings):
            shares = np.array([done[filling][0] / masked[filling] for filling in fillings])
            forwards = np.array([float(done[filling][1]) for filling in fillings])
            rows[Configuration(row["sampler"], row["changes"]).name] = (shares, forwards)
    return rows, [chain.split()[0] for chain, _ in fillings]


def packaged() -> tuple[Rows, list[str]]:
    """Rows of both halves, every prompt a group of its own."""
    data = json.loads((RESULTS / "tune_packaged.json").read_text(encoding="utf-8"))["by_hand"]
    second = {row["name"]: row for row in data["reported"]}
    rows = {}
    for row in data["choosing"]:
        if (other := second.get(row["name"])) is not None:
            scores = np.array([*row["scores"], *other["scores"]])
            rows[row["name"]] = (scores, np.full(len(scores), (row["forwards"] + other["forwards"]) / 2))
    count = len(next(iter(rows.values()))[0])
    return rows, [str(k) for k in range(count)]


def compare(rows: Rows, groups: Sequence[str], draws: int, share: float = 1.0) -> dict[str, Any]:
    """Every rule on so many halves; `share` of the choosing half's prompts are used."""
    draw, names = np.random.default_rng(SEED), list(rows)
    found: dict[str, list[tuple[float, float, bool]]] = {}
    every = np.array(groups)
    for _ in range(draws):
        own = set(draw.permutation(np.unique(every))[: len(set(groups)) // 2])
        first = np.array([name in own for name in groups])
        second = ~first
        first &= draw.random(len(groups)) < share
        by_hand = draw.random(len(names)) < BY_HAND
        points = [_point(rows, name, first, name == BASELINE or hand) for name, hand in zip(names, by_hand)]
        chosen = rules(points, list(every[first]))
        there = {what: [values[second].mean() for values in rows[point.name]] for what, point in chosen.items()}
        score, forwards = there["by hand"]
        for what, (own_score, own_forwards) in there.items():
            holds = own_score >= score - POINT - 1e-9 and own_forwards <= forwards + 1e-9
            found.setdefault(what, []).append((own_score, own_forwards, holds))
    return {
        what: dict(zip(("score", "forwards", "holds"), map(float, np.mean(values, axis=0)), strict=True))
        for what, values in found.items()
    }


def _point(rows: Rows, name: str, which: np.ndarray, by_hand: bool) -> Point:
    scores, forwards = (values[which].tolist() for values in rows[name])
    nothing = [0.0] * len(scores)
    return Point(Candidate(name), Request(), Measured(scores, [*scores], forwards, nothing, nothing), by_hand=by_hand)


def rules(points: list[Point], groups: list[str]) -> dict[str, Point]:
    """What every rule takes."""

    def score(point: Point) -> float:
        return point.choosing.mean("score")

    def cheapest(least: float) -> Point:
        good = [point for point in points if score(point) >= least - 1e-9]
        return min(good, key=lambda point: (point.choosing.mean("forwards"), -score(point)))

    base = next(point for point in points if point.name == BASELINE)
    above = [point for point in points if score(point) > score(base)]
    separated = [score(point) for point in above if paired(point.choosing, base.choosing, groups)[0] > 0]
    chosen, hand = choose(points, ("forwards",), POINT, groups)
    by_mean = cheapest(score(hand))
    cheaper = by_mean.choosing.mean("forwards") < hand.choosing.mean("forwards")
    return {
        "anchored": cheapest(max([score(base), *separated]) - POINT),
        "best": cheapest(max(map(score, points)) - POINT),
        "by hand": hand,
        "by mean": by_mean if cheaper else hand,
        "interval": chosen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300, help="pairs of halves")
    options = parser.parse_args()
    fillings, chains = antibodies()
    result = {
        "antibodies, 40 fillings choose": compare(fillings, chains, options.draws),
        "antibodies, 20 fillings choose": compare(fillings, chains, options.draws, 0.5),
        "packaged, 90 prompts choose": compare(*packaged(), options.draws),
    }
    for data, found in result.items():
        for rule, row in found.items():
            print(f"{data}, {rule}: {100 * row['score']:.1f} in {row['forwards']:.2f}; holds {row['holds']:.2f}")
    write_result(RESULTS / "tune_rules.json", {"draws": options.draws, "by_hand": BY_HAND, "data": result})


if __name__ == "__main__":
    main()
