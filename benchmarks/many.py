"""Savings of refilled batches: `paradec.generate_many` compared with fixed batches in the order of arrival.

    python benchmarks/many.py [--prompts 500] [--flat 2000] [--out benchmarks/results/many.json]

The packaged model runs on one thread with one token per step (`low_confidence`). So a row takes as many steps as its
answer has tokens: 4 to 128, drawn uniformly, without early stops. A refilled batch gives the slot of a row that has
ended to the next prompt. A fixed batch gets new prompts only when all its rows have ended; apart from that it is the
same `Batch`, so each row takes the same steps.

"slots" is steps times batch size, empty slots included. A step of rows of different lengths may take several calls of
the model (`calls_per_step`), so calls times batch size are counted, too. Times are CPU times of the process
(`time.process_time`) and wall times. The two kinds of batches alternate in one run, in turns of a hundred prompts.

"flat" has the resident memory of the process after every tenth of the prompts; "occupancy" the share of slots with a
row, for batches of 1 to 64.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from tables import many_table, occupancy_table
from timing import resident

import paradec
from paradec.batching.batch import Batch
from paradec.batching.slots import Ticket

SHORTEST, LONGEST = 4, 128
REQUEST: dict[str, Any] = {"sampler": "low_confidence", "eos_early_stop": False, "block_length": 32, "seed": 0}
TURN = 100
CASES: dict[str, dict[str, Any]] = {
    "no cache": {},
    "no cache, one call a step": {"calls_per_step": 1},
    "dual cache": {"cache": "dual", "temperature": 0.5},
}


def prompts(count: int, longest: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw arguments of `Batch.add`: prompts of the packaged model's tasks, with different `max_new_tokens`."""
    draw = random.Random(seed)
    words = ["pear", "fig", "apple", "kiwi", "plum", "lemon", "mango", "peach", "grape", "melon"]
    entries = []
    for _ in range(count):
        text = f"{draw.choice(['Sort', 'Reverse', 'Copy'])}: {' '.join(draw.sample(words, draw.randint(3, 6)))}"
        entries.append({"prompt": text, "max_new_tokens": draw.randint(SHORTEST, longest)})
    return entries


class Meter:
    """Batch with counters of its steps, rows, calls and seconds."""

    def __init__(self, model: Any, size: int, **request: Any):
        self.calls = 0
        self.batch = Batch(CountedModel(model, self), batch_size=size, **request)
        self.size, self.steps, self.rows = size, 0, 0
        self.cpu = self.wall = 0.0

    def run(self, entries: list[dict[str, Any]], fixed: bool) -> list[Ticket]:
        """Answer all prompts, in a refilled batch or in fixed ones."""
        begin = time.process_time(), time.perf_counter()
        groups: Iterable[list[dict[str, Any]]] = [entries]
        if fixed:
            groups = [entries[first : first + self.size] for first in range(0, len(entries), self.size)]
        tickets = []
        for group in groups:
            tickets += [self.batch.add(**arguments) for arguments in group]
            while self.batch.occupied or self.batch.waiting:
                ended = self.batch.step()
                self.steps += 1
                self.rows += self.batch.occupied + len(ended)
        self.cpu += time.process_time() - begin[0]
        self.wall += time.perf_counter() - begin[1]
        return tickets

    def result(self) -> dict[str, Any]:
        slots = self.steps * self.size
        return {
            "steps": self.steps,
            "slots": slots,
            "occupancy": self.rows / slots,
            "calls": self.calls,
            "calls_x_batch_size": self.calls * self.size,
            "cpu_seconds": self.cpu,
            "wall_seconds": self.wall,
        }


class CountedModel:
    """Wrapper of a model that counts its calls in a meter."""

    def __init__(self, model: Any, meter: Meter):
        self.model, self.meter = model, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, query: Any, *store: Any) -> Any:
        self.meter.calls += 1
        return self.model(query, *store)


def compare(model: Any, count: int, size: int, longest: int, calls_per_step: int = 3, **request: Any) -> dict[str, Any]:
    """Compare refilled with fixed batches on the same prompts, in turns."""
    settings = {**REQUEST, **request, "calls_per_step": calls_per_step}
    meters = {name: Meter(model, size, **settings) for name in ("refilled", "fixed")}
    entries = prompts(count, longest)
    equal = 0
    answers: dict[str, list[Ticket]] = {name: [] for name in meters}
    for turn, first in enumerate(range(0, count, TURN)):
        order = list(meters) if turn % 2 else list(meters)[::-1]
        for name in order:
            answers[name] += meters[name].run(entries[first : first + TURN], fixed=name == "fixed")
    for refilled, fixed in zip(*answers.values(), strict=True):
        assert refilled.output is not None and fixed.output is not None
        equal += torch.equal(refilled.output.new_tokens, fixed.output.new_tokens)
    results = {name: meter.result() for name, meter in meters.items()}
    ratio = {key: results["fixed"][key] / results["refilled"][key] for key in results["fixed"] if key != "occupancy"}
    return {
        "prompts": count,
        "batch_size": size,
        "answers": [SHORTEST, longest],
        "request": settings,
        **results,
        "fixed_over_refilled": ratio,
        "equal_answers": equal,
    }


def measure_memory(model: Any, count: int, size: int, longest: int) -> dict[str, Any]:
    """Measure the memory of the process while it answers many prompts."""

    def source() -> Iterator[dict[str, Any]]:
        for part in range(-(-count // TURN)):
            yield from prompts(TURN, longest, seed=part + 1)

    many = paradec.generate_many(model, source(), batch_size=size, **REQUEST)
    entries, answered = [], 0
    for answered, _ in enumerate(many, start=1):
        if answered % max(1, count // 10) == 0:
            gc.collect()
            entries.append({"prompts": answered, "resident_bytes": resident()})
    later = [entry["resident_bytes"] for entry in entries[1:]]
    return {
        "prompts": answered,
        "batch_size": size,
        "held": entries,
        "last_over_second": later[-1] / later[0] if later else None,
    }


def occupancy(model: Any, longest: int) -> list[dict[str, Any]]:
    """Measure the occupancy of batches of several sizes, which each get eight prompts per slot. The steps at the end,
    when no prompts wait any more, are included."""
    rows = []
    for size in (1, 2, 4, 8, 16, 32, 64):
        meter = Meter(model, size, **REQUEST)
        meter.run(prompts(8 * size, longest), fixed=False)
        rows.append({"batch_size": size, "prompts": 8 * size, **meter.result()})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--flat", type=int, default=2000, help="prompts of the memory measurement")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "many.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = paradec.load(dtype="float64")  # in float32, near-ties could make answers differ
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    result["dtype"] = "float64"
    sizes = (args.prompts, args.batch, args.longest)
    result["beside"] = {name: compare(model, *sizes, **case) for name, case in CASES.items()}
    result["flat"] = measure_memory(model, args.flat, args.batch, min(args.longest, 16))
    result["occupancy"] = occupancy(model, args.longest)
    write_result(args.out, result)
    print(many_table(result), occupancy_table(result), sep="\n\n")


if __name__ == "__main__":
    main()
