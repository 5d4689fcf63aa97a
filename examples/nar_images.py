"""Pictures of ImageNet classes (or captions) with NAR: a diagonal of the picture per forward.

    python examples/nar_images.py --model c2i_XL_256.pt --vq vq_ds16_c2i.pt --device cuda 207 360 387
    python examples/nar_images.py --model t2i_XL_512.pt --vq vq_ds16_t2i.pt --text-encoder google/flan-t5-xl \\
        --device cuda --caption "a fox in the snow"
    python examples/nar_images.py --tiny          # random weights: no download, no GPU, no file

The weights are on the hub: class-conditional ones in chenfeng1271/nar, those of captions in yefly/NAR-XL-t2i-stage2. A
file whose name holds no size (256, 384 or 512 pixels) needs --grid, the tokens along a side.
"""

from __future__ import annotations

import argparse

import torch

import paradec
from paradec.api.images import contact_sheet
from paradec.models.images.nar import NAR, NARConfig, NARModel
from paradec.models.images.vq import VQConfig, VQModel


def tiny() -> NARModel:
    """A NAR of two layers and one over 6 x 6 tokens, and a decoder that makes 2 x 2 pixels of each."""
    torch.manual_seed(0)
    module = NAR(NARConfig(dim=32, n_layer=2, n_head=2, vocab_size=64, grid=6))
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    sizes = {"channels": 8, "channel_mult": (1, 2), "res_blocks": 1, "z_channels": 8, "norm_groups": 4}
    return NARModel(module, VQModel(VQConfig(codebook_size=64, codebook_embed_dim=4, **sizes)), name="a tiny NAR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, default=[207, 360, 387, 974], help="labels of ImageNet")
    parser.add_argument("--model", default="c2i_XL_256.pt", help="a published file (default: %(default)s)")
    parser.add_argument("--vq", default="vq_ds16_c2i.pt", help="the file of LlamaGen's VQ (default: %(default)s)")
    parser.add_argument("--text-encoder", help="for captions: a folder or hub id of flan-t5-xl")
    parser.add_argument("--caption", action="append", help="instead of classes; may be repeated")
    parser.add_argument("--grid", type=int, default=None, help="tokens along a side; default: from the file's name")
    parser.add_argument("--tiny", action="store_true", help="use random weights")
    parser.add_argument("--guidance-scale", type=float, default=None, help="default: the authors'")
    parser.add_argument("--cfg-interval", type=int, default=None, help="guide until so many tokens are decided")
    parser.add_argument("--out", default="nar.png", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        model, interval = tiny(), 10 if args.cfg_interval is None else args.cfg_interval
    else:
        options = {} if args.text_encoder is None else {"text_encoder": args.text_encoder}
        options |= {} if args.grid is None else {"grid": args.grid}
        model = paradec.load(args.model, vq=args.vq, dtype=args.dtype, device=args.device, **options)
        interval = args.cfg_interval
    given = {"prompts": args.caption} if args.caption else {"class_labels": args.classes}
    runs = {"guided to the end": -1} | ({} if interval is None else {f"guided for {interval} tokens": interval})
    pictures = []
    for label, value in runs.items():
        out = paradec.generate_images(
            model,
            **given,
            sampler=paradec.samplers.create("nar", cfg_interval=value),
            guidance_scale=args.guidance_scale,
            seed=0,
        )
        rows = out.row_forwards // len(out.images)
        print(
            f"{label}: {out.nfe} forwards for {out.grid.length} tokens, {rows} rows evaluated for each picture, "
            f"{out.seconds:.2f} s"
        )
        pictures += out.images
    if not args.tiny:
        contact_sheet(pictures, columns=len(pictures) // len(runs)).save(args.out)


if __name__ == "__main__":
    main()
