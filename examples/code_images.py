"""CoDe: a large VAR makes the coarse scales, a small one the fine ones.

    python examples/code_images.py --large var_d30.pth --small var_d16.pth --vq vae_ch160v4096z32.pth --device cuda
    python examples/code_images.py --tiny              # the two digit models inside the package: no download, no GPU

The published checkpoints are single files (huggingface.co/FoundationVision/var; the authors' own pairs:
huggingface.co/Zigeng/VAR_CoDe). Writes code.png: a row of pictures for every split, from the small model alone to the
large one alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import paradec
from paradec.api.images import contact_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, help="labels of ImageNet (207 360 387 974), or digits")
    parser.add_argument("--large", default="var_d30.pth", help="a published file (default: %(default)s)")
    parser.add_argument("--small", default="var_d16.pth", help="(default: %(default)s)")
    parser.add_argument("--vq", default="vae_ch160v4096z32.pth", help="of both (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the digits inside the package")
    parser.add_argument("--splits", type=int, nargs="*", default=None, help="default: 0, all, and 6 to 9 between")
    parser.add_argument("--guidance-scale", type=float, default=None, help="default: the authors'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="code.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default=None, help="bfloat16, say; default: float32")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    place: dict[str, Any] = {"dtype": args.dtype, "device": args.device}
    if args.tiny:
        small, large = paradec.load("digits-var-small"), paradec.load("digits-var")
    else:
        small = paradec.load(args.small, vq=args.vq, **place)
        large = paradec.load(args.large, vq=small.vq, **place)
    scales = len(small.facts.scales)
    classes = args.classes or (list(range(10)) if args.tiny else [207, 360, 387, 974])
    between = range(1, scales) if args.tiny else range(6, scales)
    rows = []
    for split in args.splits or [0, *between, scales]:
        sampler = paradec.samplers.create("code", drafter=large, split=split)
        out = paradec.generate_images(
            small, class_labels=classes, sampler=sampler, guidance_scale=args.guidance_scale, seed=args.seed
        )
        print(f"split {split}: forwards: {max(out.draft_nfe)} large, {out.nfe} small, {out.seconds:.2f} s")
        rows += out.images
    contact_sheet(rows, columns=len(classes)).save(args.out)


if __name__ == "__main__":
    main()
