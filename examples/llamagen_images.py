"""Pictures of ImageNet classes (or captions) with LlamaGen: one token per forward, then several, and compare.

python examples/llamagen_images.py --model c2i_XL_384.pt --vq vq_ds16_c2i.pt --device cuda 207 360 387
python examples/llamagen_images.py --model t2i_XL_stage1_256.pt --vq vq_ds16_t2i.pt \\
    --text-encoder google/flan-t5-xl --device cuda --caption "a fox in the snow"
python examples/llamagen_images.py --tiny          # the digit generator inside the package: no download, no GPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

import paradec
from paradec.images import contact_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, help="class labels; by default a few")
    parser.add_argument("--model", default="c2i_XL_384.pt", help="a published file (default: %(default)s)")
    parser.add_argument("--vq", default="vq_ds16_c2i.pt", help="the file of its VQ (default: %(default)s)")
    parser.add_argument("--text-encoder", help="for captions: a folder or hub id of flan-t5-xl")
    parser.add_argument("--caption", action="append", help="instead of classes; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="use the small model inside the package")
    parser.add_argument("--sampler", default="sjd", help="what to compare with (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, help="a .png file for the pictures of both runs")
    args = parser.parse_args()

    if args.tiny:
        model, classes = paradec.load("digits-ar", device=args.device), [3, 1, 4, 1, 5]
    else:
        options = {} if args.text_encoder is None else {"text_encoder": args.text_encoder}
        model = paradec.load(args.model, vq=args.vq, dtype=args.dtype, device=args.device, **options)
        classes = [207, 360, 387, 974]
    given = {"prompts": args.caption} if args.caption else {"class_labels": args.classes or classes}

    pictures = []
    one_by_one = paradec.samplers.create("sjd", window=1)
    for label, sampler in (("one token per forward", one_by_one), (args.sampler, args.sampler)):
        out = paradec.generate_images(model, **given, sampler=sampler, seed=0)
        print(f"{label}: {out.nfe} forwards, {out.tokens_per_forward:.2f} tokens per forward, {out.seconds:.1f} s")
        pictures += out.images
    if args.out is not None:
        contact_sheet(pictures, columns=len(pictures) // 2, enlarge=4 if args.tiny else 1).save(args.out)


if __name__ == "__main__":
    main()
