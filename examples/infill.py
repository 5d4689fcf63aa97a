"""Fill masked tokens in the middle of a text. This needs a model that attends to both sides of a mask.

    python examples/infill.py --device cuda "The cat <mask> on the <mask:2>, which was still warm."
    python examples/infill.py --tiny                   # the small model inside the package: no download, no GPU

`<mask>` stands for one token, `<mask:3>` for three. With an instruction (`--prompt`) the text is the answer to it.
"""

from __future__ import annotations

import argparse

import paradec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", help="text with <mask> in it")
    parser.add_argument("--prompt", default=None, help="an instruction that the text answers (Instruct models)")
    parser.add_argument("--model", default="GSAI-ML/LLaDA-8B-Base", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use the small model inside the package")
    parser.add_argument("--sampler", default="low_confidence")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        print("The packaged model: trained on list tasks only, its words are its tokens.")
        model = paradec.load(device=args.device)
        prompt, text = args.prompt or "Reverse: pear fig apple kiwi", args.text or "kiwi <mask:2> pear"
    else:
        model = paradec.load(args.model, dtype=args.dtype, device=args.device)
        prompt, text = args.prompt, args.text or "The cat <mask> on the <mask:2>, which was still warm."

    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    out = paradec.infill(model, text if prompt is None else turns, sampler=args.sampler)
    print(f"{text}\n{out.text}")
    for number, fill in enumerate(out.fills, start=1):
        print(f"hole {number}: {fill!r}")
    print(f"{out.tokens[0]} tokens, {out.nfe} forwards")


if __name__ == "__main__":
    main()
