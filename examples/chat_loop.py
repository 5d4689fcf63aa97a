"""A conversation: every turn reuses the keys and values of the turns before it, and streams its answer.

    python examples/chat_loop.py --model JetLM/SDAR-1.7B-Chat --device cuda
    python examples/chat_loop.py --tiny                # the small model inside the package: no download, no GPU

With the cache "block", the reuse is exact on block-causal models (SDAR, Fast-dLLM v2); on other models it is
approximate (docs/caches.md). `paradec chat` is such a loop with commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from transformers import TextStreamer

import paradec


def converse(model: Any, lines: Iterable[str], **request: Any) -> None:
    """Answer each line as a turn of one conversation."""
    turns: list[dict[str, str]] = []
    prefix = None
    for line in lines:
        turns.append({"role": "user", "content": line.strip()})
        streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
        out = paradec.generate(model, turns, prefix=prefix, keep_prefix=True, streamer=streamer, **request)
        turns.append({"role": "assistant", "content": out.text})
        prefix = out.prefix
        reused = out.cost.reused_tokens[0]
        forwards = f"{out.nfe} forward{'s' * (out.nfe != 1)}"
        print(f"({out.tokens[0]} tokens, {forwards}, {reused} positions of earlier turns reused)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="JetLM/SDAR-1.7B-Chat", help="hub id or folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the packaged model, which was trained on single turns")
    parser.add_argument("--sampler", default="threshold")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    if args.tiny:
        print("The packaged model: it answers the first turn, but was not trained on second turns.")
        lines = ["Reverse: pear fig apple kiwi", "Sort: pear fig apple"]
        converse(paradec.load(device=args.device), lines, sampler=args.sampler, cache="prefix", max_new_tokens=32)
        return
    model = paradec.load(args.model, dtype=args.dtype, device=args.device)
    cache = "block" if model.facts.topology == "block_causal" else "prefix"
    converse(model, sys.stdin, sampler=args.sampler, cache=cache, max_new_tokens=args.max_new_tokens)


if __name__ == "__main__":
    main()
