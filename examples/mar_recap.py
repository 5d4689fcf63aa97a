"""MAR with and without ReCAP: continuous tokens in random order, whose late steps evaluate a few positions alone.

    python examples/mar_recap.py --model mar_large/checkpoint-last.pth --vae kl16.ckpt --device cuda 207 360 387
    python examples/mar_recap.py --tiny                # random weights: no download, no GPU, no file

The published checkpoints are single files (github.com/LTH14/mar; of pickles tensors alone are read). Writes
mar-recap.png: MAR's pictures above, ReCAP's below them, then which step drew which token, dark ones first.
"""

from __future__ import annotations

import argparse

import torch

import paradec
from paradec.api.images import contact_sheet, step_pictures
from paradec.models.images.mar import MAR, MARModel
from paradec.models.images.vq import KLDecoder, VQConfig


def tiny() -> MARModel:
    """A MAR of two layers over 6 x 6 tokens, and a decoder that makes 2 x 2 pixels of each."""
    torch.manual_seed(0)
    head = {"head_depth": 1, "head_width": 16}
    module = MAR(side=6, channels=4, width=16, depth=2, heads=2, classes=1000, buffer=4, **head)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    vae = KLDecoder(VQConfig(z_channels=4, channels=32, channel_mult=(1, 1), res_blocks=1, attention=False))
    return MARModel(module, vae, name="a tiny MAR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, default=[207, 360, 387, 974], help="labels of ImageNet")
    parser.add_argument(
        "--model", default="mar_large/checkpoint-last.pth", help="a published file (default: %(default)s)"
    )
    parser.add_argument("--vae", default="kl16.ckpt", help="the file of its VAE (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--steps", type=int, default=None, help="default: 64, or 8 with --tiny")
    parser.add_argument("--head-steps", type=int, default=None, help="default: 100, or 10 with --tiny")
    parser.add_argument("--local-steps", type=int, default=1, help="ReCAP's l: local steps after a full one")
    parser.add_argument("--guidance-scale", type=float, default=None, help="default: the authors'")
    parser.add_argument("--out", default="mar-recap.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default=None, help="bfloat16, say; default: float32")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        model, steps, head_steps = tiny(), args.steps or 8, args.head_steps or 10
    else:
        model = paradec.load(args.model, vae=args.vae, dtype=args.dtype, device=args.device)
        steps, head_steps = args.steps or 64, args.head_steps or 100
    rows = []
    for name, local in (("mar", 0), ("recap", args.local_steps)):
        out = paradec.generate_images(
            model,
            class_labels=args.classes,
            sampler=paradec.samplers.create("mar", local_steps=local, head_steps=head_steps),
            steps=steps,
            guidance_scale=args.guidance_scale,
            seed=0,
            trace=True,
        )
        read = [f"{'full' if step.kind == 'full' else 'local'} {step.forwarded[0]}" for step in out.trace.steps]
        print(
            f"{name}: {out.nfe} forwards, {out.seconds:.2f} s; positions evaluated for each picture: {', '.join(read)}"
        )
        rows += out.images + [image.resize(out.images[0].size, 0) for image in step_pictures(out)]
    if not args.tiny:
        count = len(args.classes)
        rows = rows[:count] + rows[2 * count : 3 * count] + rows[count : 2 * count] + rows[3 * count :]
        contact_sheet(rows, columns=count).save(args.out)


if __name__ == "__main__":
    main()
