"""Digits by the packaged diffusion transformer: all DDIM steps, fewer steps, and TaylorSeer on all steps.

    python examples/digits_dit.py                      # offline, no GPU; writes digits-dit.png, a row for each run
    python examples/digits_dit.py --interval 3 --basis newton --order 2
    python examples/digits_dit.py --tiny               # two images, few steps, no file

`paradec.accelerate` attaches to this pipeline as to any diffusers pipeline; `session.report()` lists its calls.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import paradec
from paradec.api.images import contact_sheet, to_pil
from paradec.models.images.pixel_dit import PixelDiTPipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=5, help="steps from one evaluation to the next")
    parser.add_argument("--order", type=int, default=1)
    parser.add_argument("--basis", default="taylor", help="taylor, newton, hermite, reuse, foca, dmd")
    parser.add_argument("--target", default="module", help="module, block, output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", metavar="FILE.png", default="digits-dit.png", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="two images, 10 steps, no file")
    args = parser.parse_args()
    if args.tiny:
        args.classes, args.steps = [3, 8], 10

    pipe = PixelDiTPipeline.digits()
    pipe.set_progress_bar_config(disable=True)
    rows: list[Tensor] = []

    def paint(steps: int) -> Tensor:
        draw = torch.Generator().manual_seed(args.seed)
        return pipe(args.classes, num_inference_steps=steps, generator=draw, output_type="pt").images

    def run(name: str, steps: int) -> None:
        begin = time.perf_counter()
        rows.append(paint(steps))
        difference = (rows[-1] - rows[0]).abs().mean()
        seconds = time.perf_counter() - begin
        print(f"{name}: {seconds:.2f} s, mean difference from the full run's pixels {difference:.4f}")

    run(f"{args.steps} steps", args.steps)
    fewer = -(-args.steps // args.interval)
    run(f"{fewer} steps", fewer)
    sampler = paradec.Forecast(when=paradec.Every(args.interval), order=args.order, how=args.basis, where=args.target)
    with paradec.accelerate(pipe, sampler) as session:
        run(f"{args.steps} steps, {fewer} evaluated", args.steps)
    print(session.report())
    if not args.tiny:
        contact_sheet(to_pil(torch.cat(rows)), columns=len(args.classes), enlarge=4).save(args.compare)


if __name__ == "__main__":
    main()
