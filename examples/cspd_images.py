"""MAR with a smaller MAR that drafts for it (CSpD), beside the model alone with as many of its own forwards.

    python examples/cspd_images.py --model mar_huge/checkpoint-last.pth --draft mar_base/checkpoint-last.pth \
        --vae kl16.ckpt --device cuda 207 360 387
    python examples/cspd_images.py --tiny              # random weights: no download, no GPU, no file

The published checkpoints are single files (github.com/LTH14/mar; of pickles tensors alone are read). Writes cspd.png:
pictures of CSpD, then of the model alone with as many of its own forwards and with all steps, then of the draft model.
"""

from __future__ import annotations

import argparse

import torch

import paradec
from paradec.api.images import contact_sheet
from paradec.models.images.mar import MAR, MARModel
from paradec.models.images.vq import KLDecoder, VQConfig


def tiny(width: int, vae: KLDecoder, name: str) -> MARModel:
    """A MAR of one layer over 6 x 6 tokens; the decoder makes 2 x 2 pixels of each."""
    torch.manual_seed(width)
    head = {"head_depth": 1, "head_width": width}
    module = MAR(side=6, channels=4, width=width, depth=1, heads=2, classes=1000, buffer=4, **head)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return MARModel(module, vae, name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, default=[207, 360, 387, 974], help="labels of ImageNet")
    parser.add_argument(
        "--model", default="mar_huge/checkpoint-last.pth", help="a published file (default: %(default)s)"
    )
    parser.add_argument("--draft", default="mar_base/checkpoint-last.pth", help="a smaller one (default: %(default)s)")
    parser.add_argument("--vae", default="kl16.ckpt", help="the file of their VAE (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--steps", type=int, default=None, help="default: 64, or 16 with --tiny")
    parser.add_argument("--head-steps", default=None, help="default: 100, or 10,1 with --tiny")
    parser.add_argument("--num-draft", type=int, default=8, help="steps between verifications (default: %(default)s)")
    parser.add_argument("--published", action="store_true", help="the rule as published, instead of the mended one")
    parser.add_argument("--guidance-scale", type=float, default=None, help="default: the model's authors'")
    parser.add_argument("--out", default="cspd.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default=None, help="bfloat16, say; default: float32")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        vae = KLDecoder(VQConfig(z_channels=4, channels=32, channel_mult=(1, 1), res_blocks=1, attention=False))
        model, draft = tiny(16, vae, "a tiny MAR"), tiny(8, vae, "a tinier one")
        steps, head_steps = args.steps or 16, args.head_steps or "10,1"
    else:
        place = {"vae": args.vae, "dtype": args.dtype, "device": args.device}
        model, draft = paradec.load(args.model, **place), paradec.load(args.draft, **place)
        steps, head_steps = args.steps or 64, args.head_steps or "100"
    head_steps = int(head_steps) if head_steps.isdecimal() else head_steps  # or section counts
    settings = {"head_steps": head_steps, "num_draft": args.num_draft, "mended": not args.published}
    drafted = paradec.samplers.create("cspd", draft=draft, **settings)
    # the target alone is CSpD whose steps are all its own
    alone = paradec.samplers.create("cspd", ratio=1, head_steps=head_steps)
    given = {"class_labels": args.classes, "seed": 0, "guidance_scale": args.guidance_scale}
    first = paradec.generate_images(model, sampler=drafted, steps=steps, **given)
    made = {
        "cspd": first,
        "the model alone, as many forwards": paradec.generate_images(model, sampler=alone, steps=first.nfe, **given),
        "the model alone": paradec.generate_images(model, sampler=alone, steps=steps, **given),
        "the draft model alone": paradec.generate_images(draft, sampler=alone, steps=steps, **given),
    }
    for name, out in made.items():
        drafts = f" and {max(out.draft_nfe)} of the draft model" if any(out.draft_nfe) else ""
        print(f"{name}: {out.nfe} forwards{drafts}, {out.seconds:.2f} s")
    if not args.tiny:
        pictures = [image for out in made.values() for image in out.images]
        contact_sheet(pictures, columns=len(args.classes)).save(args.out)


if __name__ == "__main__":
    main()
