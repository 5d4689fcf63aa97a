r"""Speculative Jacobi decoding of images, compared with one token per forward.

    python examples/sjd_images.py --tiny                # the digit generator inside the package: no download, no GPU
    python examples/sjd_images.py --model c2i_XL_384.pt --vq vq_ds16_c2i.pt --device cuda --classes 207 360 387
    python examples/sjd_images.py --model BAAI/Emu3-Gen-hf --device cuda --prompt "a portrait of a young girl"
    python examples/sjd_images.py --model deepseek-community/Janus-Pro-1B --device cuda \
        --prompt "<|User|>: a red fox in the snow\n\n<|Assistant|>:"
    python examples/sjd_images.py --tiny --drafter digits-ar-drafter     # also with speculative decoding

`--sampler gsd`, `lantern` or `jacobi` compares that sampler instead of `sjd`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import paradec
from paradec.api.images import contact_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="c2i_XL_384.pt", help="hub id, folder, or a LlamaGen file on the hub")
    parser.add_argument("--vq", help="file of the VQ, for models with a separate one (LlamaGen, Chameleon)")
    parser.add_argument("--text-encoder", help="for LlamaGen's captions: a folder or hub id of flan-t5-xl")
    parser.add_argument("--classes", nargs="*", type=int, default=[207, 360, 387], help="ImageNet labels")
    parser.add_argument("--prompt", action="append", help="a text instead of classes; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="use the small model inside the package")
    parser.add_argument("--sampler", default="sjd", help="sampler to compare (default: %(default)s)")
    parser.add_argument("--drafter", help="a smaller model of the same images: also compare with `speculative`")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="a .png file for the images, with a row for each run")
    args = parser.parse_args()

    if args.tiny:
        model, request = paradec.load("digits-ar", device=args.device), {"class_labels": [3, 1, 4, 1, 5]}
    else:
        parts = {"vq": args.vq, "text_encoder": args.text_encoder, "dtype": args.dtype, "device": args.device}
        model = paradec.load(args.model, **{name: value for name, value in parts.items() if value is not None})
        request = {"prompts": args.prompt} if args.prompt else {"class_labels": args.classes}

    samplers = {"one token per forward": paradec.samplers.create("sjd", window=1), args.sampler: args.sampler}
    if args.drafter is not None:
        drafter = paradec.load(args.drafter, device=args.device)
        samplers["speculative"] = paradec.samplers.create("speculative", drafter=drafter)

    images = []
    for label, sampler in samplers.items():
        out = paradec.generate_images(model, **request, sampler=sampler, seed=0)
        print(f"{label}: {out.nfe} forwards, {out.tokens_per_forward:.2f} tokens per forward, {out.seconds:.1f} s")
        if any(out.draft_nfe):
            print(f"    and {max(out.draft_nfe)} forwards of the drafter")
        images += out.images
    if args.out is not None:
        contact_sheet(images, columns=len(images) // len(samplers), enlarge=4 if args.tiny else 1).save(args.out)


if __name__ == "__main__":
    main()
