"""What the samplers of scales spend outside of the models, at the shape of VAR-d16, and the memory of their store.

    python benchmarks/scales.py                  # writes results/scales.json
    python benchmarks/scales.py --dry-run        # a tiny shape

Random weights (the shape alone counts), one thread. The transformer and the parts of the VQ autoencoder that a step
runs (upsampling, smoothing, the next input) count as model; all else is the sampler's: guidance, filters, draws,
bookkeeping. Each figure is the median of `--repeats` decodes, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from provenance import write_result

import paradec
from paradec.core.protocol import decode
from paradec.models.images.multi_scale_vq import MultiScaleVQ, MultiScaleVQConfig
from paradec.models.images.var import VAR, VARModel

RESULTS = Path(__file__).resolve().parent / "results" / "scales.json"
PUBLISHED = {"guidance_scale": 2.5, "top_k": 900, "top_p": 0.96}
SHAPES: dict[str, dict[str, Any]] = {
    "d16": {"depth": 16, "width": 1024, "heads": 16},
    "tiny": {"depth": 2, "width": 64, "heads": 2},
}


class Timed(VARModel):
    """A model that adds up the seconds that it takes."""

    seconds = 0.0

    def __call__(self, query: Any, store: Any = None) -> Any:
        begin = time.perf_counter()
        answer = super().__call__(query, store)
        self.seconds += time.perf_counter() - begin
        return answer

    def place(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        found = super().place(*arguments)
        self.seconds += time.perf_counter() - begin
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = SHAPES["tiny" if args.dry_run else "d16"]
    vq = MultiScaleVQ(MultiScaleVQConfig(channels=32, encoder=False))  # its decoder plays no part
    module = VAR(**shape)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    model = Timed(module.requires_grad_(False), vq.requires_grad_(False))
    sampler = paradec.samplers.create("var")
    shares, totals, inside, held = [], [], [], 0
    for seed in range(-1, args.repeats):  # the first one is not counted
        model.seconds = 0.0
        state = sampler.start(model, [207] * args.rows, seed=seed + 1, **PUBLISHED)
        held = 0 if state.store is None else state.store.nbytes
        begin = time.perf_counter()
        decode(sampler, model, state)
        total = time.perf_counter() - begin
        if seed >= 0:
            totals.append(total)
            inside.append(model.seconds)
            shares.append((total - model.seconds) / model.seconds)
            print(f"{total:.2f} s, outside of the models {shares[-1]:.3f} of them", flush=True)
    ends = model.facts.ends
    result = {
        "shape": shape,
        "rows": args.rows,
        "repeats": args.repeats,
        "seconds": [statistics.median(totals), min(totals), max(totals)],
        "model_seconds": [statistics.median(inside), min(inside), max(inside)],
        "outside_over_model": [statistics.median(shares), min(shares), max(shares)],
        "store_bytes": held,
        "store_bytes_on_paper": 2 * shape["depth"] * 2 * args.rows * ends[-2] * shape["width"] * 4,
    }
    if not args.dry_run:
        write_result(args.out, result)
    print(result)


if __name__ == "__main__":
    main()
