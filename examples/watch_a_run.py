"""One prompt, decoded with one token per step and with `threshold`: an animation, and a page to step through.

Both runs use blocks of 8 tokens, a little longer than the answer. In longer blocks the run with one token per step
would spend most of its forwards on the padding after the answer, and look slower than necessary.

    python examples/watch_a_run.py                       # offline, no GPU; writes watch.gif and watch.html
    python examples/watch_a_run.py "Latin square: Q Z S U" --sampler wino
    python examples/watch_a_run.py --gif docs/assets/threshold.gif --html ""    # the README's animation
    python examples/watch_a_run.py --tiny                # no files

`paradec generate --trace run.json` and `paradec trace a.json b.json --out both.html` do the same on the command line.
"""

from __future__ import annotations

import argparse

import paradec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Sort: wolf fig otter zebra deer orange")
    parser.add_argument("--model", help="a folder or a hub id; by default the small model inside the package")
    parser.add_argument("--sampler", default="threshold")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--gif", metavar="FILE.gif", default="watch.gif", help="(default: %(default)s)")
    parser.add_argument("--html", metavar="FILE.html", default="watch.html", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="no files")
    args = parser.parse_args()
    if args.tiny:
        args.gif = args.html = ""

    model = paradec.load(args.model)
    request = {"max_new_tokens": args.max_new_tokens, "block_length": args.block_length, "trace": True}
    plain = paradec.generate(model, args.prompt, sampler="low_confidence", **request)
    fast = paradec.generate(model, args.prompt, sampler=args.sampler, **request)
    names = ["one token per step", args.sampler]
    for name, out in zip(names, (plain, fast), strict=True):
        print(f"{name}: {out.nfe} forwards\n{out.text}")
    if args.gif:
        plain.trace.to_gif(args.gif, beside=fast.trace, names=names)
    if args.html:
        plain.trace.to_html(args.html, beside=fast.trace, names=names)


if __name__ == "__main__":
    main()
