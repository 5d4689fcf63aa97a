"""Pictures of ImageNet classes with a student of Distilled Decoding: one forward, two, or with its teacher in between.

    python examples/distilled_images.py --model llamagen-L.pt --vq vq_ds16_c2i.pt --device cuda 207 360 387
    python examples/distilled_images.py --model llamagen-L.pt --vq vq_ds16_c2i.pt --device cuda \\
        --teacher c2i_L_256.pt --teacher-preset llamagen_l_22
    python examples/distilled_images.py --model var-d16.pth --vq vae_ch160v4096z32.pth --device cuda \\
        --teacher var_d16.pth --teacher-preset var_d16_3
    python examples/distilled_images.py --tiny      # random weights: no download, no GPU, no file

The students are in microsoft/distilled_decoding on the hub (LlamaGen-DD and VAR-DD), teachers and VQs in
FoundationVision/LlamaGen and FoundationVision/var.
"""

from __future__ import annotations

import argparse

import torch

import paradec
from paradec.api.images import contact_sheet
from paradec.models.images.distilled_llamagen import (
    DistilledLlamaGen,
    DistilledLlamaGenConfig,
    DistilledLlamaGenModel,
)
from paradec.models.images.llamagen import LlamaGen, LlamaGenConfig, LlamaGenModel
from paradec.models.images.vq import VQConfig, VQModel


def tiny() -> tuple[DistilledLlamaGenModel, LlamaGenModel]:
    """A student of two layers over 6 x 6 tokens with a decoder that makes 2 x 2 pixels of each, and its teacher."""
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "grid": 6}
    student = DistilledLlamaGen(DistilledLlamaGenConfig(**sizes, codebook_dim=4))
    teacher = LlamaGen(LlamaGenConfig(**sizes))
    for parameter in [*student.parameters(), *teacher.parameters()]:
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    decoder = {"channels": 8, "channel_mult": (1, 2), "res_blocks": 1, "z_channels": 8, "norm_groups": 4}
    vq = VQModel(VQConfig(codebook_size=64, codebook_embed_dim=4, **decoder))
    return DistilledLlamaGenModel(student, vq, "a tiny student"), LlamaGenModel(teacher)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, default=[207, 360, 387, 974], help="labels of ImageNet")
    parser.add_argument("--model", default="llamagen-L.pt", help="a published student (default: %(default)s)")
    parser.add_argument("--vq", default="vq_ds16_c2i.pt", help="the file of its VQ (default: %(default)s)")
    parser.add_argument("--teacher", help="the model that it was distilled from, to draw some tokens itself")
    parser.add_argument(
        "--teacher-preset", default="llamagen_l_22", help="llamagen_l_22, var_d16_3, ... (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--out", default="distilled.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    taught = None
    if args.tiny:
        model, teacher = tiny()
        taught = paradec.samplers.create("distilled", teacher=teacher, teacher_start=8)
    else:
        common = {"dtype": args.dtype, "device": args.device}
        model = paradec.load(args.model, vq=args.vq, **common)
        if args.teacher is not None:
            with_vq = {} if isinstance(model, DistilledLlamaGenModel) else {"vq": model.vq}  # codes of VAR are shared
            teacher = paradec.load(args.teacher, **common, **with_vq)
            taught = paradec.samplers.create("distilled", preset=args.teacher_preset, teacher=teacher)
    runs = {"one forward": {"steps": 1}, "two forwards": {"steps": 2}}
    runs |= {} if taught is None else {"with its teacher": {"sampler": taught}}
    pictures = []
    for label, given in runs.items():
        out = paradec.generate_images(model, class_labels=args.classes, seed=0, **given)
        print(f"{label}: {out.nfe} forward{'s' * (out.nfe != 1)} for {out.grid.length} tokens, {out.seconds:.2f} s")
        pictures += out.images
    if not args.tiny:
        contact_sheet(pictures, columns=len(args.classes)).save(args.out)


if __name__ == "__main__":
    main()
