"""VAR: pictures scale by scale, one forward for each.

    python examples/var_images.py --model var_d30.pth --vq vae_ch160v4096z32.pth --device cuda 207 360 387
    python examples/var_images.py --tiny               # the digits inside the package: no download, no GPU

The published checkpoints are single files (huggingface.co/FoundationVision/var). Writes var.png: the pictures, and
above them what they looked like after each scale.
"""

from __future__ import annotations

import argparse

import paradec
from paradec.api.images import contact_sheet, to_pil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, help="labels of ImageNet (207 360 387 974), or digits")
    parser.add_argument("--model", default="var_d30.pth", help="a published file (default: %(default)s)")
    parser.add_argument("--vq", default="vae_ch160v4096z32.pth", help="the file of its VQ (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the digits inside the package")
    parser.add_argument("--guidance-scale", type=float, default=None, help="default: the authors'")
    parser.add_argument("--smooth", action="store_true", help="blend codes: smoother pictures, for looks alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="var.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default=None, help="bfloat16, say; default: float32")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        model, classes = paradec.load("digits-var"), args.classes or list(range(10))
    else:
        model = paradec.load(args.model, vq=args.vq, dtype=args.dtype, device=args.device)
        classes = args.classes or [207, 360, 387, 974]
    sampler = paradec.samplers.create("var", smooth=args.smooth)
    out = paradec.generate_images(
        model, class_labels=classes, sampler=sampler, guidance_scale=args.guidance_scale, seed=args.seed
    )
    sides = ", ".join(map(str, model.facts.scales))
    print(f"var: {out.nfe} forwards for scales of {sides}; {out.tokens.shape[1]} tokens a picture, {out.seconds:.2f} s")
    stages = [image for pictures in model.stages(out.tokens) for image in to_pil(pictures)]
    contact_sheet(stages, columns=len(classes)).save(args.out)


if __name__ == "__main__":
    main()
