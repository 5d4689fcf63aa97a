"""CPU time per denoising run with TaylorSeer: paradec compared with diffusers' hook and cache-dit.

    python benchmarks/peers/pictures.py [--sizes tiny wide] [--models DiT FLUX] [--turns 7]

Needs `pip install -e ".[bench]"`. DiT and FLUX transformers with random weights take 24 Euler steps from the same
noise, on one thread. Every method evaluates the transformer at the same 7 steps, those of diffusers' schedule (interval
5 after 3 first steps, order 1), and forecasts the other steps. diffusers' hook and "paradec" forecast attention and
feed-forward of every block. cache-dit evaluates the first block of each list of blocks at every step, and forecasts the
sum of the other blocks. "paradec, stack" forecasts the residual of all blocks, "paradec, output" the whole output.

On DiT, paradec's latents are compared with those of diffusers' hook. On FLUX they differ by design, since in a
single-stream block the hook forecasts each branch, and paradec their sum. Writes
benchmarks/results/peers_pictures.json.
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
    cases = race(args.models, args.sizes, args.turns)
    facts = common.machine() | {"turns": args.turns, "steps": STEPS, "full_steps": list(FULL_STEPS)}
    write_result(args.out, {"facts": facts, "cases": cases})


if __name__ == "__main__":
    main()
