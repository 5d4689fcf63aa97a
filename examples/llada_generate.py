"""Decode one prompt with LLaDA, first with one token per step, then with several, and compare.

python examples/llada_generate.py --device cuda "Natalia sold 48 clips in April ..."
python examples/llada_generate.py --tiny           # the small model inside the package: no download, no GPU
"""

from __future__ import annotations

import argparse

import paradec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", help="by default a question that the model can answer")
    parser.add_argument("--model", default="GSAI-ML/LLaDA-8B-Instruct", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use the small model inside the package")
    parser.add_argument("--sampler", default="threshold", help="sampler of the second run (default: %(default)s)")
    parser.add_argument("--cache", default="none", help="cache of the second run (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        model, question = paradec.load(device=args.device), "Reverse: pear fig apple kiwi"
        print("The packaged model: trained on list tasks only, its words are its tokens.")
    else:
        model = paradec.load(args.model, dtype=args.dtype, device=args.device)
        question = "A train covers 120 km in 1.5 hours. How long does it need for 200 km? Answer briefly."

    # one token per step is the baseline
    runs = [("low_confidence", "none"), (args.sampler, args.cache)]
    for sampler, cache in runs:
        out = paradec.generate(
            model, args.prompt or question, sampler=sampler, cache=cache, max_new_tokens=args.max_new_tokens
        )
        forwards = f"{out.nfe} forward{'s' * (out.nfe != 1)}"
        print(f"\n{sampler}, cache {cache}: {forwards}, {out.tokens_per_forward:.1f} tokens per forward")
        print(out.text)


if __name__ == "__main__":
    main()
