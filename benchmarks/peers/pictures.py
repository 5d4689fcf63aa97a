"""Forecasts inside a transformer: paradec beside diffusers' hook and cache-dit, in time per run.

    python benchmarks/peers/pictures.py [--sizes tiny wide] [--models DiT FLUX] [--turns 7]

Needs `pip install -e ".[bench]"`. DiT and FLUX transformers with random weights take 24 Euler steps from the same
noise, one thread. Every method evaluates them at the same 7 steps, those of diffusers' schedule (interval 5, 3 first
steps, order 1), and forecasts the others. Same modules for diffusers' hook and ours: attention and feed-forward of
every block. cache-dit evaluates one block of each list at every step, and forecasts the sum of the others. "paradec,
stack" and "paradec, output" are our other targets on the same schedule: what all blocks add, and the whole output.

On DiT our results are compared with diffusers'; on FLUX its hook forecasts the branches of a single block and ours
their sum. Writes benchmarks/results/peers_pictures.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common
from forecasting import FULL_STEPS, MODELS, SIZES, STEPS, race
from provenance import write_result

RESULTS = common.BENCHMARKS / "results" / "peers_pictures.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "wide"], choices=list(SIZES))
    parser.add_argument("--turns", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    args = parser.parse_args()
    found = race(args.models, args.sizes, args.turns)
    facts = common.machine() | {"turns": args.turns, "steps": STEPS, "full_steps": list(FULL_STEPS)}
    write_result(args.out, {"facts": facts, "cases": found})


if __name__ == "__main__":
    main()
