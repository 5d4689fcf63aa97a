"""Savings of refilled batches: `paradec.generate_many` compared with fixed batches in the order of arrival.

    python benchmarks/many.py [--prompts 500] [--flat 2000] [--out benchmarks/results/many.json]

The packaged model on one thread, one token per step (`low_confidence`), so a row takes as many steps as its answer has
tokens: 4 to 128, drawn uniformly, without early stops. A fixed batch is the same `Batch`, which gets new prompts only
when all its rows have ended. So both take the same steps for each row, and only the number of rows per step differs.
The number of slots is steps times batch size, with empty slots. A step of rows of different lengths may take several
calls (`calls_per_step`), so calls times batch size are counted, too. Times are CPU times of the process
(`time.process_time`) and wall times, of both in one run, in turns of a hundred prompts.

`flat` is the resident memory of the process after every tenth of the prompts; `occupancy` the share of slots with a
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
    """Make arguments of `Batch.add`: prompts that the packaged model knows, with answers of different lengths."""
    draw = random.Random(seed)
    words = ["pear", "fig", "apple", "kiwi", "plum", "lemon", "mango", "peach", "grape", "melon"]
    entries = []
    for _ in range(count):
        text = f"{draw.choice(['Sort', 'Reverse', 'Copy'])}: {' '.join(draw.sample(words, draw.randint(3, 6)))}"
        entries.append({"prompt": text, "max_new_tokens": draw.randint(SHORTEST, longest)})
    return entries


class Meter:
    """Runner of a batch that counts its costs."""

    def __init__(self, model: Any, size: int, **request: Any):
        self.calls = 0
        self.batch = Batch(Counted(model, self), batch_size=size, **request)
        self.size, self.steps, self.rows = size, 0, 0
        self.cpu = self.wall = 0.0

    def run(self, entries: list[dict[str, Any]], fixed: bool) -> list[Ticket]:
        """Answer all prompts: with rows refilled one by one, or (`fixed`) whole batches at once."""
        begin = time.process_time(), time.perf_counter()
        groups: Iterable[list[dict[str, Any]]] = [entries]
        if fixed:
            groups = [entries[at : at + self.size] for at in range(0, len(entries), self.size)]
        tickets = []
        for group in groups:
            tickets += [self.batch.add(**each) for each in group]
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


class Counted:
    """Model with counted calls."""

    def __init__(self, model: Any, meter: Meter):
        self.model, self.meter = model, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, query: Any, *store: Any) -> Any:
        self.meter.calls += 1
        return self.model(query, *store)


def beside(model: Any, count: int, size: int, longest: int, calls_per_step: int = 3, **request: Any) -> dict[str, Any]:
    """Compare refilled batches with fixed ones, in turns, on the same prompts."""
    settings = {**REQUEST, **request, "calls_per_step": calls_per_step}
    meters = {name: Meter(model, size, **settings) for name in ("refilled", "fixed")}
    entries = prompts(count, longest)
    equal = 0
    answers: dict[str, list[Ticket]] = {name: [] for name in meters}
    for turn, at in enumerate(range(0, count, TURN)):
        order = list(meters) if turn % 2 else list(meters)[::-1]
        for name in order:
            answers[name] += meters[name].run(entries[at : at + TURN], fixed=name == "fixed")
    for one, other in zip(*answers.values(), strict=True):
        assert one.output is not None and other.output is not None
        equal += torch.equal(one.output.new_tokens, other.output.new_tokens)
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


def flat(model: Any, count: int, size: int, longest: int) -> dict[str, Any]:
    """Measure the memory of the process while it answers many prompts."""

    def source() -> Iterator[dict[str, Any]]:
        for part in range(-(-count // TURN)):
            yield from prompts(TURN, longest, seed=part + 1)

    many = paradec.generate_many(model, source(), batch_size=size, **REQUEST)
    held, answered = [], 0
    for answered, _ in enumerate(many, start=1):
        if answered % max(1, count // 10) == 0:
            gc.collect()
            held.append({"prompts": answered, "resident_bytes": resident()})
    later = [entry["resident_bytes"] for entry in held[1:]]
    return {
        "prompts": answered,
        "batch_size": size,
        "held": held,
        "last_over_second": later[-1] / later[0] if later else None,
    }


def occupancy(model: Any, longest: int) -> list[dict[str, Any]]:
    """Measure the occupancy of batches of several sizes, including their end; each gets eight prompts per slot."""
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
    parser.add_argument("--flat", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "many.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = paradec.load(dtype="float64")  # with float32 answers could differ at near-ties
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    result["dtype"] = "float64"
    sizes = (args.prompts, args.batch, args.longest)
    result["beside"] = {name: beside(model, *sizes, **case) for name, case in CASES.items()}
    result["flat"] = flat(model, args.flat, args.batch, min(args.longest, 16))
    result["occupancy"] = occupancy(model, args.longest)
    write_result(args.out, result)
    print(many_table(result), occupancy_table(result), sep="\n\n")


if __name__ == "__main__":
    main()
