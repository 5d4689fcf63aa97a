"""What constraints do to the packaged model's answers, and what they cost at a large vocabulary.

    python benchmarks/constrained.py [--limit 48]   # right answers and forwards, without and with a constraint
    python benchmarks/constrained.py --cost         # CPU time of automata and steps, no forward

The constraint of a task is what can be said of its answers before they are known: an order of the prompt's words
(`sort`, `reverse`, `shuffle`: a choice of all orders), or the prompt's words in lines and columns (`latin_square`: a
pattern).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paradec
from paradec.constraints import passes, spelling
from paradec.constraints.byte_automaton import byte_automaton
from paradec.constraints.lift import lift
from paradec.constraints.marginals import Marginals, _run_sums
from paradec.constraints.values import Constraint
from paradec.samplers.statistics import token_statistics
from paradec.tools.evaluation.tasks import get_task, load_prompts

WAYS: dict[str, dict[str, Any]] = {
    "one a step": {"sampler": "low_confidence"},
    "threshold": {"sampler": "threshold"},
    "all at once": {"sampler": "low_confidence", "steps": 1},
}
VOCAB, SLOTS, TURNS, TEMPERATURES = 126_464, 16, 21, (0.0, 0.7, 1.0)


def constraint_of(task: str, items: list[str]) -> Constraint:
    """What an answer must be."""
    if task == "latin_square":
        row = " ".join(["(" + "|".join(items) + ")"] * len(items))
        return paradec.Regex("\n".join([row] * len(items)))
    return paradec.Choice([" ".join(order) for order in itertools.permutations(items)])


def answers(limit: int) -> None:
    model = paradec.load()
    for name in ("sort", "reverse", "shuffle", "latin_square"):
        task, examples = get_task(name), load_prompts(name, limit)
        for way, asked in WAYS.items():
            found = []
            for held in (False, True):
                prompts = [
                    {"prompt": each.prompt} | ({"constraint": constraint_of(name, [*each.items])} if held else {})
                    for each in examples
                ]
                outputs = list(paradec.generate_many(model, prompts, max_new_tokens=64, block_length=64, **asked))
                right = sum(task.check(each, out.text) for each, out in zip(examples, outputs, strict=True))
                found.append((100 * right / len(examples), sum(out.nfe for out in outputs) / len(outputs)))
            said = " -> ".join(f"{share:5.1f} % in {forwards:4.1f} forwards" for share, forwards in found)
            print(f"{name:14} {way:12} {said}", flush=True)
    template(model)


def template(model: Any) -> None:
    """Five fields of a number each, whose names are given: their tokens take no forward."""
    names = ["apple", "banana", "cherry", "date", "fig"]
    held = paradec.Regex(", ".join(f"{name}: [0-9]" for name in names))
    for way in ("one a step", "threshold"):
        asked: dict[str, Any] = {"max_new_tokens": 64, "block_length": 64, **WAYS[way]}
        out = paradec.generate(model, "Copy: " + " ".join(names), constraint=held, **asked)
        print(f"five fields    {way:12} {out.tokens[0]} tokens in {out.nfe} forwards: {out.text}")


# ---- cost -----------------------------------------------------------------------------------------------------------


def made_up_vocabulary() -> dict[int, bytes]:
    """Single bytes, letters with and without a space before them, numbers, signs of JSON, characters of several
    bytes."""
    draw, found = np.random.default_rng(0), {bytes([byte]): byte for byte in range(256)}
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    share = np.linspace(3, 0.2, 26)
    while len(found) < VOCAB:
        text, kind = draw.choice(letters, int(draw.integers(2, 11)), p=share / share.sum()).tobytes(), draw.random()
        if kind < 0.5:
            text = b" " + text
        elif kind < 0.56:
            text = str(int(draw.integers(10, 10**6))).encode()
        elif kind < 0.6:
            text = draw.choice(np.frombuffer(b'",:{}[] \n.-', np.uint8), int(draw.integers(2, 5))).tobytes()
        elif kind < 0.65:
            text = chr(int(draw.integers(0x4E00, 0x9FFF))).encode() + text[:3]
        found.setdefault(text, len(found))
    return {token: text for text, token in found.items()}


class Tokenizer:
    """Of the vocabulary, as far as a constraint asks."""

    all_special_ids = (VOCAB - 1,)
    chat_template = None

    def __len__(self) -> int:
        return VOCAB


class Logits(nn.Module):
    """Random ones, the same at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB + 2, max_position_embeddings=4096)
        self.logits = 3 * torch.randn(1, 96, VOCAB + 2, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits[:, : ids.shape[1]]


def milliseconds(works: dict[str, Any]) -> dict[str, list[float]]:
    """CPU times of each, in turns; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(TURNS + 1):
        for name, work in works.items():
            begin = time.process_time()
            work()
            if turn:
                times[name].append(1e3 * (time.process_time() - begin))
    return times


def schemas() -> dict[str, Constraint]:
    fields = zip("abcdef", ("string", "integer", "number", "boolean", "string", "integer"), strict=True)
    six = {name: {"type": kind} for name, kind in fields}
    three = {"name": {"type": "string"}, "age": {"type": "integer", "maximum": 120}, "ok": {"type": "boolean"}}
    return {
        "date": paradec.Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        "3 fields": paradec.JsonSchema({"type": "object", "properties": three, "required": [*three]}),
        "6 fields": paradec.JsonSchema({"type": "object", "properties": six, "required": [*six]}),
        "64 characters": paradec.Regex(".{1,64}"),
    }


def cost() -> None:
    texts = made_up_vocabulary()
    spelt, tokenizer = spelling.Spelling((texts,), dict.fromkeys(texts, 0)), Tokenizer()
    spelling._KNOWN[tokenizer] = spelt
    topology: dict[str, Any] = {"prediction": "same", "topology": "bidirectional", "tokenizer": tokenizer}
    model = paradec.wrap(Logits(), mask_token_id=VOCAB, eos_token_id=VOCAB - 1, **topology)
    sampler = paradec.samplers.create("threshold")

    def step(value: Constraint | None, temperature: float) -> Any:
        asked: dict[str, Any] = {"max_new_tokens": 64, "block_length": SLOTS, "temperature": temperature}
        state = sampler.start(model, torch.tensor([[5, 6, 7]]), constraint=value, **asked)
        queries = sampler.query(state)
        output = [model(query) for query in queries]
        return lambda: sampler.propose(state, [each.clone() for each in output], queries)

    for name, value in schemas().items():
        begin = time.process_time()
        found = lift(byte_automaton(value.node()), spelt, VOCAB).ended([VOCAB - 1])
        made = 1e3 * (time.process_time() - begin)
        logits, last = model.module.logits[0, :SLOTS, :VOCAB], found.reach(64 - SLOTS)
        held: list[int | None] = [None] * SLOTS
        own = Marginals(found, logits, held, 0, last)
        best = own.best()
        works = {
            "sums of runs": lambda: _run_sums(found.runs, logits),  # noqa: B023
            "passes": lambda: passes.conditioned(found, own.sums, 0, last),  # noqa: B023
            "best text": own.best,
            "confidences": lambda: own.probabilities(best),  # noqa: B023
            "all statistics": lambda: token_statistics(own.conditioned(), ("minus_entropy",)),  # noqa: B023
            "joint draw": lambda: own.drawn(np.full(SLOTS, 0.5)),  # noqa: B023
        }
        for warm in TEMPERATURES:
            works |= {f"free, {warm}": step(None, warm), f"held, {warm}": step(value, warm)}
        times = milliseconds(works)
        print(
            f"{name}: {found.states} states, {found.classes} classes, {len(found.runs.classes)} runs, "
            f"{len(found.edges)} edges, {found.nbytes / 1e6:.1f} MB, made in {made:.0f} ms"
        )
        for warm in TEMPERATURES:
            free, with_it = times.pop(f"free, {warm}"), times.pop(f"held, {warm}")
            low, middle, high = statistics.quantiles([b / a for a, b in zip(free, with_it, strict=True)], n=4)
            print(
                f"  a step at temperature {warm}: {statistics.median(free):.1f} ms without, "
                f"{statistics.median(with_it):.1f} with, {middle:.2f} times ({low:.2f} to {high:.2f})"
            )
        print("  " + ", ".join(f"{part} {statistics.median(each):.2f}" for part, each in times.items()), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=48, help="prompts of each task")
    parser.add_argument("--cost", action="store_true", help="CPU time at a vocabulary of 126,464 instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cost() if arguments.cost else answers(arguments.limit)


if __name__ == "__main__":
    main()
