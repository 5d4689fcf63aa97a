"""Pictures of ImageNet classes with LPD: groups of codes in its own order, in other orders, and one code at a time.

    python examples/lpd_images.py --model lpd_l_256.pth --vq vq_ds16_c2i.pt --device cuda 207 360 387
    python examples/lpd_images.py --model lpd_xl_512.pth --vq vq_ds16_c2i.pt --device cuda --groups 32
    python examples/lpd_images.py --tiny               # random weights: no download, no GPU, no file

The published checkpoints are single files of mit-han-lab's lpd_l_256, lpd_xl_256, lpd_xxl_256, lpd_l_512 and lpd_xl_512
on the hub (of pickles tensors alone are read); the VQ is LlamaGen's. Writes lpd-images.png: a row of pictures for each
order, then which step drew which code, dark ones first.
"""

from __future__ import annotations

import argparse

import torch

import paradec
from paradec.api.images import contact_sheet, step_pictures
from paradec.core import orders
from paradec.models.images.lpd import LPD, LPDConfig, LPDModel
from paradec.models.images.vq import VQConfig, VQModel


def tiny() -> LPDModel:
    """An LPD of two layers over 8 x 8 codes, and a decoder that makes 2 x 2 pixels of each."""
    torch.manual_seed(0)
    module = LPD(LPDConfig(dim=16, n_layer=2, n_head=2, grid=8, vocab_size=32))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sizes = {"codebook_size": 32, "codebook_embed_dim": 4, "channels": 8, "channel_mult": (1, 2), "res_blocks": 1}
    return LPDModel(module, VQModel(VQConfig(**sizes, z_channels=8, norm_groups=4)), name="a tiny LPD")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, default=[207, 360, 387, 974], help="labels of ImageNet")
    parser.add_argument("--model", default="lpd_l_256.pth", help="a published file (default: %(default)s)")
    parser.add_argument("--vq", default="vq_ds16_c2i.pt", help="the file of LlamaGen's VQ (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--groups", type=int, default=None, help="default: the published 20 for 256 pixels, 48 for 512")
    parser.add_argument("--guidance-scale", type=float, default=None, help="default: the authors'")
    parser.add_argument("--out", default="lpd-images.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    model = tiny() if args.tiny else paradec.load(args.model, vq=args.vq, dtype=args.dtype, device=args.device)
    grid = model.grid()
    count = args.groups or len(orders.group_sizes(grid.height * grid.width))
    runs = {
        "one code per forward": {"order": "raster"},
        "lpd": {"order": "lpd", "sizes": count},
        "halton": {"order": "halton", "sizes": count},
        "diagonal": {"order": "diagonal"},
    }
    pictures, steps = [], []
    for label, order in runs.items():
        out = paradec.generate_images(
            model,
            class_labels=args.classes,
            sampler=paradec.samplers.create("groups", order=order),
            guidance_scale=args.guidance_scale,
            seed=0,
            trace=True,
        )
        sizes = [int(counts[0]) for counts in out.accepted]
        shown = f"groups of {sizes}" if len(sizes) <= 48 else f"{len(sizes)} groups"
        print(f"{label}: {out.nfe} forwards, {out.seconds:.2f} s; {shown}")
        pictures += out.images
        steps += [image.resize(out.images[0].size, 0) for image in step_pictures(out)]
    if not args.tiny:
        contact_sheet(pictures + steps, columns=len(args.classes)).save(args.out)


if __name__ == "__main__":
    main()
