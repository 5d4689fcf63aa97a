"""Digits by the packaged masked transformer with MaskGIT, Halton order and ReCAP; prints the positions evaluated.

    python examples/maskgit_recap.py                   # offline, no GPU; writes a sheet for each sampler
    python examples/maskgit_recap.py --steps 16 --classes 4 2
    python examples/maskgit_recap.py --tiny            # few steps, no files

The three samplers fill the 49 codes of an image in the same number of steps. ReCAP chooses the codes of two steps at
once; the second of the two evaluates only these codes, with the keys and values that the first stored.
"""

from __future__ import annotations

import argparse

import paradec
from paradec.api.images import contact_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits-maskgit", help="(default: %(default)s, inside the package)")
    parser.add_argument("--classes", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--local-steps", type=int, default=1, help="l: local steps after a full one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="two images, 4 steps, no files")
    args = parser.parse_args()
    if args.tiny:
        args.classes, args.steps = [3, 8], 4

    model = paradec.load(args.model)
    samplers = {
        "maskgit": paradec.samplers.create("maskgit"),
        "halton": paradec.samplers.create("halton"),
        "recap": paradec.samplers.create("recap", local_steps=args.local_steps),
    }
    for name, sampler in samplers.items():
        out = paradec.generate_images(
            model, class_labels=args.classes, sampler=sampler, steps=args.steps, seed=args.seed
        )
        positions = [max(step.forwarded) for step in out.trace.steps]
        print(f"{name}: {out.nfe} forwards of {positions} positions (both guidance branches), {out.seconds:.2f} s")
        if not args.tiny:
            contact_sheet(out.images, columns=len(args.classes), enlarge=4).save(f"digits-{name}.png")


if __name__ == "__main__":
    main()
