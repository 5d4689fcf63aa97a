"""What statistics and the logits of undecided positions alone save on a CPU, and how a step grows with rows and canvas.

    python benchmarks/undecided.py [--turns 9] [--tree FOLDER]

One thread, one run, all in turns; times are the process's own, factors medians of ratios within a turn.

1. Statistics of float32 logits [rows, V] over one float32 softmax of them, as one writes it and into memory that is
   kept: token and probability, and these with margin and entropy. With --tree another checkout's as well.
2. Whole decodings by a random transformer with LLaDA's vocabulary whose output matrix is about half of a cached step,
   with the logits of whole windows and with those of undecided positions alone.
3. Milliseconds of a step outside of the model's call by rows, by the length of a block and by the length of the canvas;
   the vocabulary has 1,000 tokens.

Prints tables and writes benchmarks/results/undecided.json.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.core.protocol import decode
from paradec.kernels.token_stats import portable
from paradec.models.adapter import Model
from paradec.samplers.masked import queries

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {"probability": frozenset[str](), "margin, entropy": frozenset(("margin", "entropy"))}
SIZES = ((32_000, (8, 64, 256)), (126_464, (8, 32, 128)), (152_064, (32,)))
NEVER = 2**62


def in_turns(functions: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of the process itself, turn by turn; odd turns go backwards."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-1, turns):  # the first one warms up
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            begin = time.process_time()
            functions[name]()
            if turn >= 0:
                found[name].append(time.process_time() - begin)
    return found


def ratio(found: dict[str, list[float]], name: str, base: str) -> list[float]:
    """Median and quartiles of a function's time over another's."""
    ratios = [a / b for a, b in zip(found[name], found[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(middle, 3), round(low, 3), round(high, 3)]


def portable_of(tree: Path) -> types.ModuleType:
    """Another checkout's portable path; what it imports is this one's."""
    path = tree / "paradec" / "kernels" / "token_stats" / "portable.py"
    module = types.ModuleType("portable_of_another_tree")
    sys.modules[module.__name__] = module
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def statistics_of(logits: Tensor, turns: int, modules: dict[str, types.ModuleType]) -> dict[str, Any]:
    """One size's row of the table."""
    out = torch.empty_like(logits)
    functions: dict[str, Callable[[], Any]] = {
        "softmax": lambda: logits.softmax(-1),
        "softmax, kept memory": lambda: torch.softmax(logits, -1, out=out),
    }
    for name, module in modules.items():
        for fields, wanted in FIELDS.items():
            read = module.chunked_stats
            functions[f"{name}: {fields}"] = lambda r=read, w=wanted: r(logits, w, 1.0, None)
    found = in_turns(functions, turns * max(1, 16 // len(logits)))
    row: dict[str, Any] = {
        f"{base}, ms": round(1e3 * statistics.median(found[base]), 3) for base in list(functions)[:2]
    }
    for base in list(functions)[:2]:
        row[f"over {base}"] = {name: ratio(found, name, base) for name in list(functions)[2:]}
    return row


def measure_statistics(turns: int, modules: dict[str, types.ModuleType]) -> list[dict[str, Any]]:
    rows = []
    for vocabulary, counts in SIZES:
        for count in counts:
            logits = 4 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(0))
            rows.append({"vocabulary": vocabulary, "rows": count} | statistics_of(logits, turns, modules))
            print(rows[-1])
    return rows


def random_model(vocabulary: int, hidden: int, layers: int) -> Model:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    module = LlamaForCausalLM(config).eval()
    return paradec.wrap(
        module, mask_token_id=vocabulary - 1, eos_token_id=(), topology="bidirectional", prediction="same"
    )


def measure_decoding(turns: int) -> list[dict[str, Any]]:
    model = random_model(126_464, 128, 8)
    rows = []
    for name, cache, count in (("low_confidence", "dual", 1), ("low_confidence", "dual", 4)):
        prompt = torch.randint(1000, (count, 32), generator=torch.Generator().manual_seed(0))
        seen: dict[str, Tensor] = {}

        def run(spared: int, key: str, name: str = name, cache: str = cache, prompt: Tensor = prompt) -> None:
            kept, queries.SPARED = queries.SPARED, spared
            sampler = paradec.samplers.create(name)
            state = sampler.start(model, prompt, max_new_tokens=32, block_length=32, cache=cache)
            seen[key] = decode(sampler, model, state).canvas  # noqa: B023
            queries.SPARED = kept

        functions = {"whole": lambda: run(NEVER, "whole"), "undecided": lambda: run(queries.SPARED, "undecided")}  # noqa: B023
        found = in_turns(functions, turns)
        row = {
            "sampler": name,
            "cache": cache,
            "rows": count,
            "whole_ms": round(1e3 * statistics.median(found["whole"]), 1),
            "undecided over whole": ratio(found, "undecided", "whole"),
            "same tokens": torch.equal(seen["whole"], seen["undecided"]),
        }
        print(row)
        rows.append(row)
    return rows


class Timed:
    """A model whose calls are timed, and answered with the same logits each time: it does not matter which."""

    def __init__(self, model: Model):
        self.model, self.seconds = model, 0.0
        self.made: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Any, *store: Any) -> Tensor:
        begin = time.process_time()
        shape = (*query.wanted.shape, self.model.facts.vocab_size)
        if shape not in self.made:
            self.made[shape] = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        logits = self.made[shape].clone()
        self.seconds += time.process_time() - begin
        return logits


def outside(model: Model, rows: int, block: int, canvas: int) -> float:
    """Milliseconds of a step outside of the model's call, in one block of the canvas."""
    sampler = paradec.samplers.create("low_confidence")
    timed = Timed(model)
    prompt = torch.randint(100, (rows, canvas - block), generator=torch.Generator().manual_seed(0))
    state = sampler.start(timed, prompt, max_new_tokens=block, block_length=block)
    steps, begin = 0, time.process_time()
    with torch.inference_mode():
        while not state.done and steps < 8:
            sampler.commit(state, sampler.step(timed, state))
            steps += 1
    return 1e3 * (time.process_time() - begin - timed.seconds) / steps


def measure_growth(turns: int) -> dict[str, dict[str, float]]:
    model = random_model(1000, 64, 1)
    axes = {
        "rows": [(count, 32, 256) for count in (1, 2, 4, 8, 16, 32, 64)],
        "block": [(4, block, 256) for block in (8, 16, 32, 64, 128)],
        "canvas": [(4, 32, canvas) for canvas in (128, 256, 512, 1024, 2048, 4096)],
    }
    cases = list(dict.fromkeys(case for each in axes.values() for case in each))
    times: dict[Any, list[float]] = {case: [] for case in cases}
    for turn in range(-1, turns):
        for case in cases[:: -1 if turn % 2 else 1]:
            taken = outside(model, *case)
            if turn >= 0:
                times[case].append(taken)
    found = {}
    for place, (axis, each) in enumerate(axes.items()):
        found[axis] = {str(case[place]): round(statistics.median(times[case]), 3) for case in each}
        print(axis, found[axis])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tree", type=Path, help="another checkout, whose statistics are measured beside ours")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    modules: dict[str, types.ModuleType] = {"ours": portable}
    if arguments.tree is not None:
        modules["other"] = portable_of(arguments.tree)
    result: dict[str, Any] = {
        "device": f"cpu ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        "turns": arguments.turns,
    }
    path = ROOT / "benchmarks" / "results" / "undecided.json"
    parts = {
        "outside_ms": measure_growth,
        "statistics": lambda turns: measure_statistics(turns, modules),
        "decoding": measure_decoding,
    }
    for name, measure in parts.items():
        result[name] = measure(arguments.turns)
        write_result(path, result)
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
