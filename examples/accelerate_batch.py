"""Answer prompts on several devices: every process has the whole model and decodes its share of them.

    accelerate launch --num_processes 4 examples/accelerate_batch.py prompts.jsonl answers.jsonl --model LLADA
    torchrun --nproc_per_node 2 examples/accelerate_batch.py --tiny       # without a GPU

Every line of prompts.jsonl is {"prompt": ...}. Process r of n answers the lines r, r + n, ... and writes the answers to
answers.jsonl.r-of-n. The first process then joins these files in the order of the prompts. A row's answer does not
depend on the process that decodes it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import paradec
from paradec.integrations.ray import seed_of

try:
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list
except ImportError:
    raise SystemExit("this needs paradec's extra 'accelerate', e.g. pip install -e '.[accelerate]'") from None

TINY = ["Sort: pear fig apple", "Reverse: pear fig apple kiwi", "Copy: plum lime fig", "Sort: owl ant bee", "Hello"]


def answer_share(state: PartialState, model: Any, source: Path, out: Path, batch: int, **request: Any) -> None:
    """Answer this process's lines; if it is the first process, then join the files of all processes."""
    lines = [json.loads(line) for line in source.read_bytes().split(b"\n") if line.strip()]
    share = range(state.process_index, len(lines), state.num_processes)
    entries = ({"prompt": lines[number]["prompt"], "id": number, "seed": seed_of(0, number)} for number in share)
    with part_of(out, state.process_index, state.num_processes).open("w") as file:
        for result in paradec.generate_many(model, entries, batch_size=batch, **request):
            error = None if result.error is None else str(result.error)
            file.write(json.dumps({"line": result.id, "text": result.text, "error": error}) + "\n")
    state.wait_for_everyone()
    if state.is_main_process:
        parts = [part_of(out, rank, state.num_processes) for rank in range(state.num_processes)]
        answers = [json.loads(line) for part in parts for line in part.open()]
        answers.sort(key=lambda answer: answer["line"])
        out.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        for part in parts:
            part.unlink()
    state.wait_for_everyone()


def part_of(out: Path, rank: int, count: int) -> Path:
    """Name the file that a process writes."""
    return out.with_name(f"{out.name}.{rank}-of-{count}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--model", default=None, help="hub id or folder; by default the packaged model")
    parser.add_argument("--tiny", action="store_true", help="the packaged model, with prompts that it knows")
    parser.add_argument("--batch", type=int, default=8, help="rows that a process decodes together")
    parser.add_argument("--sampler", default="threshold")
    parser.add_argument("--dtype", default=None)
    args = parser.parse_args()

    state = PartialState(cpu=not torch.accelerator.is_available())
    model = paradec.load(None if args.tiny else args.model, dtype=args.dtype, device=str(state.device))
    if args.tiny:
        with tempfile.TemporaryDirectory() as own_folder:
            folder = [own_folder]
            if state.num_processes > 1:
                broadcast_object_list(folder)  # all processes use the folder of the first one
            source, out = Path(folder[0]) / "prompts.jsonl", Path(folder[0]) / "answers.jsonl"
            if state.is_main_process:
                source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TINY))
            state.wait_for_everyone()
            answer_share(state, model, source, out, args.batch, sampler=args.sampler)
            if state.is_main_process:
                print(f"{state.num_processes} processes")
                print(out.read_text(), end="")
            state.wait_for_everyone()
    elif args.source is None or args.out is None:
        parser.error("give the files of prompts and answers, or --tiny")
    else:
        answer_share(state, model, args.source, args.out, args.batch, sampler=args.sampler)


if __name__ == "__main__":
    main()
