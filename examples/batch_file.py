"""Answer a file of prompts in batches, with a line per answer; an interrupted run can be continued.

    python examples/batch_file.py prompts.jsonl answers.jsonl --model GSAI-ML/LLaDA-8B-Instruct --device cuda
    python examples/batch_file.py --tiny               # the small model inside the package: no download, no GPU

The command `paradec generate --in prompts.jsonl --out answers.jsonl` does this too; copy this file to add own code.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import paradec


def answer_file(model: Any, source: Path, out: Path, batch: int, **request: Any) -> tuple[int, int]:
    """Decode the prompts that have no line in `out`. Returns the numbers of new answers and of failures."""
    prompts = [json.loads(line)["prompt"] for line in source.read_bytes().split(b"\n") if line.strip()]
    lines = out.read_bytes().split(b"\n")[:-1] if out.exists() else []
    out.write_bytes(b"".join(line + b"\n" for line in lines))  # removes a last line that is incomplete
    done = {json.loads(line)["line"] for line in lines}
    waiting = [number for number in range(len(prompts)) if number not in done]
    answered = failed = 0
    with out.open("a") as file:
        for first in range(0, len(waiting), batch):
            numbers = waiting[first : first + batch]
            entries = decode(model, [prompts[number] for number in numbers], **request)
            for number, entry in zip(numbers, entries, strict=True):
                file.write(json.dumps({"line": number, "prompt": prompts[number], **entry}) + "\n")
                failed += "error" in entry
                answered += "error" not in entry
            file.flush()  # an interrupt loses no finished batch
    return answered, failed


def decode(model: Any, prompts: list[str], **request: Any) -> list[dict[str, Any]]:
    """Decode prompts; return the fields to write for each. If a batch fails, decode its prompts one by one."""
    try:
        out = paradec.generate(model, prompts, **request)
    except (ValueError, FloatingPointError) as error:
        if len(prompts) == 1:
            return [{"error": str(error)}]
        return [entry for prompt in prompts for entry in decode(model, [prompt], **request)]
    rows = zip(out.text, out.tokens, out.row_nfe, strict=True)
    return [{"text": text, "tokens": tokens, "forwards": forwards} for text, tokens, forwards in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, help='a line for each prompt: {"prompt": ...}')
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--model", default=None, help="hub id or folder; by default the packaged model")
    parser.add_argument("--tiny", action="store_true", help="the packaged model, with prompts that it knows")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sampler", default="threshold")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    args = parser.parse_args()

    model = paradec.load(None if args.tiny else args.model, dtype=args.dtype, device=args.device)
    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "prompts.jsonl", Path(folder) / "answers.jsonl"
            texts = ["Sort: pear fig apple", "Hello", "Reverse: pear fig apple kiwi"]
            source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
            for _ in range(2):  # the second call finds nothing to do
                print("{} answered, {} failed".format(*answer_file(model, source, out, 2, sampler=args.sampler)))
            print(out.read_text(), end="")
    elif args.source is None or args.out is None:
        parser.error("give the files of prompts and answers, or --tiny")
    else:
        numbers = answer_file(model, args.source, args.out, args.batch, sampler=args.sampler)
        print("{} answered, {} failed".format(*numbers))


if __name__ == "__main__":
    main()
