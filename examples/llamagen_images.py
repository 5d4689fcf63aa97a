"""Pictures of ImageNet classes (or captions) with LlamaGen: one token per forward, then several, and compare.

python examples/llamagen_images.py --model c2i_XL_384.pt --vq vq_ds16_c2i.pt --device cuda 207 360 387
python examples/llamagen_images.py --model c2i_XXL_384.pt --drafter c2i_B_384.pt --device cuda 207 360
python examples/llamagen_images.py --model t2i_XL_stage1_256.pt --vq vq_ds16_t2i.pt \\
    --text-encoder google/flan-t5-xl --device cuda --caption "a fox in the snow"
python examples/llamagen_images.py --tiny          # the digit generator inside the package: no download, no GPU
python examples/llamagen_images.py --tiny --drafter digits-ar-drafter
"""

from __future__ import annotations

import argparse
from pathlib import Path

import paradec
from paradec.api.images import contact_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", type=int, help="class labels; by default a few")
    parser.add_argument(
        "--model", default="c2i_XL_384.pt", help="a file of FoundationVision/LlamaGen on the hub (default: %(default)s)"
    )
    parser.add_argument("--vq", default="vq_ds16_c2i.pt", help="the file of its VQ (default: %(default)s)")
    parser.add_argument("--text-encoder", help="for captions: a folder or hub id of flan-t5-xl")
    parser.add_argument("--caption", action="append", help="instead of classes; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="use the small model inside the package")
    parser.add_argument("--sampler", default="sjd", help="what to compare with (default: %(default)s)")
    parser.add_argument("--drafter", help="a smaller model of the same pictures: also compare with `speculative`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, help="a .png file for the pictures of all runs")
    args = parser.parse_args()

    common = {"device": args.device} if args.tiny else {"device": args.device, "dtype": args.dtype}
    if args.tiny:
        model, classes = paradec.load("digits-ar", **common), [3, 1, 4, 1, 5]
    else:
        options = {} if args.text_encoder is None else {"text_encoder": args.text_encoder}
        model = paradec.load(args.model, vq=args.vq, **common, **options)
        classes = [207, 360, 387, 974]
    given = {"prompts": args.caption} if args.caption else {"class_labels": args.classes or classes}

    runs = {"one token per forward": paradec.samplers.create("sjd", window=1), args.sampler: args.sampler}
    if args.drafter is not None:
        shared = {} if model.text_encoder is None else {"text_encoder": model.text_encoder}
        drafter = paradec.load(args.drafter, **common, **shared)
        runs["speculative"] = paradec.samplers.create("speculative", drafter=drafter)

    pictures = []
    for label, sampler in runs.items():
        out = paradec.generate_images(model, **given, sampler=sampler, seed=0)
        print(f"{label}: {out.nfe} forwards, {out.tokens_per_forward:.2f} tokens per forward, {out.seconds:.1f} s")
        if any(out.draft_nfe):
            print(f"    and {max(out.draft_nfe)} of the drafter")
        pictures += out.images
    if args.out is not None:
        contact_sheet(pictures, columns=len(pictures) // len(runs), enlarge=4 if args.tiny else 1).save(args.out)


if __name__ == "__main__":
    main()
