"""Measure what suffix windows save over the same cache without a window, and their effect on answers.

    python benchmarks/suffix.py cost
    python benchmarks/suffix.py accuracy [--limit 8]

`cost`: one thread, a random model of hidden size 64 with 8 layers, a prompt of 128 tokens, blocks of 32 in four steps
(sampler `random`, so that all configurations take the same steps). For every answer length the configurations run in
turns; reported are the median CPU seconds, and the ratio of the slowest to the fastest turn. Writes
benchmarks/results/suffix.json.

`accuracy`: right answers of the packaged model to the packaged prompts, and positions evaluated per answer, in blocks
of 8 with `max_new_tokens` of 32 and of 128 for the same short answers. Writes benchmarks/results/suffix_accuracy.json.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from typing import Any

import torch
from caches import answer_packaged, random_model
from provenance import RESULTS, write_result
from tables import suffix_accuracy_table, suffix_table

import paradec
from paradec.models.adapter import Model
from paradec.tools.evaluation.tasks import load_prompts

PROMPT, BLOCK, STEPS = 128, 32, 4
"""Positions of the prompt and of a block; steps of a block."""
ANSWERS = (128, 256, 512, 1024, 2048)
"""Maximum numbers of new tokens."""
WAYS = (
    ("prefix", None),
    ("prefix", "64"),
    ("prefix", "gaussian:256"),
    ("dual", None),
    ("dual", "64"),
    ("d2", None),
    ("d2", "64"),
)
"""(Cache, suffix) of `cost`."""
QUALITY = tuple((slots, suffix) for slots in (32, 128) for suffix in (None, "8", "16", "gaussian:32"))
"""(Maximum number of new tokens, suffix) of `accuracy`."""
VOCAB = 200


def decode_once(model: Model, prompt: list[int], answer: int, cache: str, suffix: str | None) -> dict[str, float]:
    """Decode once; return CPU seconds, positions evaluated and forwards."""
    begin = time.process_time()
    out = paradec.generate(
        model,
        [prompt],
        sampler="random",
        cache=cache,
        suffix=suffix,
        max_new_tokens=answer,
        block_length=BLOCK,
        steps=answer // BLOCK * STEPS,
        seed=0,
        eos_early_stop=False,
    )
    return {"cpu": time.process_time() - begin, "positions": out.forwarded_tokens, "nfe": out.nfe}


def cost() -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 2}
    model, rows = random_model(vocab_size=VOCAB, **sizes), []
    prompt = torch.randint(1, VOCAB - 1, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    for answer in ANSWERS:
        turns: dict[Any, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(3 if answer <= 512 else 1):
            for way in WAYS:
                turns[way].append(decode_once(model, prompt, answer, *way))
        for way, turn_rows in turns.items():
            base = turns[way[0], None]
            row = {"answer": answer, "cache": way[0], "suffix": way[1], "turns": len(turn_rows)}
            row |= {"positions": turn_rows[0]["positions"], "nfe": turn_rows[0]["nfe"]}
            row["of_positions"] = turn_rows[0]["positions"] / base[0]["positions"]
            seconds = [run["cpu"] for run in turn_rows]
            row |= {"cpu_seconds": statistics.median(seconds), "cpu_spread": max(seconds) / min(seconds)}
            rows.append(row | {"of_cpu": statistics.median(seconds) / statistics.median(run["cpu"] for run in base)})
            print(rows[-1], flush=True)
    settings = {"prompt": PROMPT, "block": BLOCK, "steps_per_block": STEPS}
    device = f"cpu ({platform.machine()}), 1 thread"
    write_result(RESULTS / "suffix.json", {"device": device, "torch": torch.__version__} | settings | {"rows": rows})
    print(suffix_table({"rows": rows}))


def accuracy(limit: int | None) -> None:
    torch.set_num_threads(1)
    model, rows = paradec.load(), []
    prompts = load_prompts(limit=limit)
    for slots, suffix in QUALITY:
        request = {"max_new_tokens": slots, "block_length": 8, "suffix": suffix}
        right, positions, forwards = answer_packaged(model, prompts, **request)
        row = {"slots": slots, "suffix": suffix, "right": right, "prompts": len(prompts)}
        rows.append(row | {"positions": positions, "forwards": forwards})
        print(rows[-1], flush=True)
    write_result(RESULTS / "suffix_accuracy.json", {"sampler": "threshold", "block": 8, "rows": rows})
    print(suffix_accuracy_table({"rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cost", "accuracy"))
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    if args.what == "cost":
        cost()
    else:
        accuracy(args.limit)


if __name__ == "__main__":
    main()
