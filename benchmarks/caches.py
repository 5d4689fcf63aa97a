"""Costs and savings of caches: CPU time, positions evaluated and bookkeeping, compared with no cache.

    python benchmarks/caches.py speed
    python benchmarks/caches.py accuracy [--limit 8]
    python benchmarks/caches.py prefix

`speed`: one thread, one run, a random model of hidden size 512 with 8 layers. For every shape each cache decodes the
same prompts with the sampler `random`, which works with every cache and commits a fixed number of tokens per step.
The baseline is the mean of a run without a cache before the others and one after them. Seconds are CPU time, which
other processes influence less than wall time. "bookkeeping" is the time for the cache's plan, the query built from it,
and the store's writes and gathers, as a share of the model time that the cache saves. Writes
benchmarks/results/caches.json.

`accuracy`: right answers on the packaged prompts with the packaged model, and positions evaluated per answer. Writes
benchmarks/results/caches_accuracy.json.

`prefix`: the model of `speed` with a block-causal mask and the cache `block`, one thread. Eight rows with a common
prefix, with and without `share_prefix`; three turns of a chat, with and without the prefix stored by the turn before.
CPU seconds of whole requests: each runs without reuse, with it, and again without (the mean of the two). Writes
benchmarks/results/caches_prefix.json.

Encoders (AntiBERTy) are not measured: they have no store, and only the cache `none` works with them.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from typing import Any

import torch
from provenance import RESULTS, write_result
from tables import caches_accuracy_table, caches_prefix_table, caches_table

import paradec
from paradec.caches.cost import CacheCost
from paradec.caches.table import REFUSED, verdict
from paradec.models.adapter import Model
from paradec.tools.evaluation.tasks import TASKS, Example, load_prompts

SHAPES = (
    {"rows": 1, "prompt": 448, "new": 64, "block": 32, "steps": 16},
    {"rows": 1, "prompt": 960, "new": 64, "block": 32, "steps": 16},
    {"rows": 4, "prompt": 448, "new": 64, "block": 32, "steps": 16},
    {"rows": 1, "prompt": 128, "new": 384, "block": 64, "steps": 48},
    {"rows": 1, "prompt": 32, "new": 96, "block": 32, "steps": 24},
    {"rows": 1, "prompt": 16, "new": 32, "block": 16, "steps": 16},
)
VARIANTS = (
    ("vicinity", {"prefix_look": 4, "after_look": 4}),
    ("dkv_decode", {"refresh_interval": 4}),
    ("dkv_decode", {"refresh_interval": 2}),
    ("dkv_greedy", {"window": 6}),
)
"""(Cache, settings) that `accuracy` measures in addition to every cache with its defaults."""
VOCAB = 1000


def random_model(block_length: int | None = None, **sizes: int) -> Model:
    """Build a random Llama of hidden size 512, 8 layers, 8 heads of 64. `sizes` override these. With a block length the
    model is block-causal, otherwise bidirectional."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    shape |= {"num_attention_heads": 8, "max_position_embeddings": 4096}
    topology = "bidirectional" if block_length is None else "block_causal"
    module = LlamaForCausalLM(LlamaConfig(**shape | sizes))
    ids = {"mask_token_id": sizes.get("vocab_size", VOCAB) - 1, "eos_token_id": 0}
    return paradec.wrap(module, topology=topology, prediction="same", block_length=block_length, **ids)


class Clock:
    """Counter of the process's CPU seconds in the functions that it wraps; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def __call__(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += time.process_time() - begin

        return counted


def decode(model: Model, cache: str, prompts: list[list[int]], shape: dict[str, int]) -> dict[str, Any]:
    """Decode once; measure CPU seconds in total, in the model's calls, and in the cache's bookkeeping."""
    sampler = paradec.samplers.create("random")
    state = sampler.start(
        model,
        prompts,
        cache=cache,
        max_new_tokens=shape["new"],
        block_length=shape["block"],
        steps=shape["steps"],
        seed=0,
        eos_early_stop=False,
    )
    in_model, bookkeeping = Clock(), Clock()
    call = in_model(model)
    if state.store is not None:
        for name in ("bind", "visible", "update"):
            setattr(state.store, name, bookkeeping(getattr(state.store, name)))
    query = bookkeeping(sampler.query)
    begin = time.process_time()
    with torch.inference_mode():
        while not state.done:
            queries = query(state)
            outputs = [call(q) if state.store is None else call(q, state.store) for q in queries]
            sampler.commit(state, sampler.propose(state, outputs, queries))
    seconds = time.process_time() - begin
    cost = CacheCost.from_state(state, state.counts)
    state.store = None
    return {
        "seconds": seconds,
        "model_seconds": in_model.seconds,
        "bookkeeping_seconds": bookkeeping.seconds,
        "forwarded": sum(cost.forwarded_tokens),
    }


def speed() -> None:
    """Measure CPU time and positions evaluated with every cache, for every shape."""
    torch.set_num_threads(1)
    model = random_model()
    sampler = paradec.samplers.create("random")
    names = [
        name
        for name in paradec.caches.names()
        if name != "none" and verdict(sampler, paradec.caches.create(name), model.facts).status != REFUSED
    ]
    rows = []
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, VOCAB - 1, (shape["rows"], shape["prompt"]), generator=generator).tolist()
        warm = {**shape, "new": shape["block"], "steps": 1}
        decode(model, "none", prompts, warm)
        plain = decode(model, "none", prompts, shape)
        runs = {name: decode(model, name, prompts, shape) for name in names}
        plain_after = decode(model, "none", prompts, shape)
        plain |= {key: (plain[key] + plain_after[key]) / 2 for key in plain if key.endswith("seconds")}
        for name, cached in runs.items():
            saved = plain["model_seconds"] - (cached["model_seconds"] - cached["bookkeeping_seconds"])
            row = {
                "speed_up": plain["seconds"] / cached["seconds"],
                "positions": cached["forwarded"] / plain["forwarded"],
                "bookkeeping_of_saved": cached["bookkeeping_seconds"] / saved if saved > 0 else None,
                "seconds": cached["seconds"],
                "seconds_without": plain["seconds"],
            }
            rows.append({**shape, "cache": name, **row})
            print(rows[-1], flush=True)
    result = {"device": f"cpu ({platform.machine()}), 1 thread", "torch": torch.__version__, "rows": rows}
    write_result(RESULTS / "caches.json", result)
    print(caches_table(result))


def prefix() -> None:
    """Measure a prefix that eight rows share, and one that three turns of a chat reuse."""
    torch.set_num_threads(1)
    model = random_model(block_length=32)
    generator = torch.Generator().manual_seed(1)

    def ids(*shape: int) -> list[Any]:
        return torch.randint(1, VOCAB - 1, shape, generator=generator).tolist()

    def run(rows: list[list[int]], **changes: Any) -> tuple[float, paradec.Output]:
        request = {"sampler": "random", "steps": 16, "max_new_tokens": 64, "seed": 0, "eos_early_stop": False}
        begin = time.process_time()
        out = paradec.generate(model, rows, cache="block", **request, **changes)
        return time.process_time() - begin, out

    result_rows: list[dict[str, Any]] = []

    def record(what: str, plain_s: list[float], reused_s: float, plain: paradec.Output, reused: paradec.Output) -> None:
        result_rows.append(
            {
                "what": what,
                "seconds_without": sum(plain_s) / len(plain_s),
                "seconds": reused_s,
                "positions_without": plain.forwarded_tokens,
                "positions": reused.forwarded_tokens,
                "store_bytes_without": plain.cost.store_bytes,
                "store_bytes": reused.cost.store_bytes,
            }
        )

    run(ids(1, 32))
    for common in (128, 512):
        shared = ids(common)
        rows = [shared + tail for tail in ids(8, 32)]
        first, plain = run(rows)
        seconds, reused = run(rows, share_prefix=True)
        record(f"8 x ({common} shared + 32 + 64)", [first, run(rows)[0]], seconds, plain, reused)
    stored, row = None, ids(256)
    for turn in range(3):
        first, plain = run([row])
        seconds, reused = run([row], prefix=stored, keep_prefix=True)
        record(f"turn {turn + 1}: 1 x ({len(row)} + 64)", [first, run([row])[0]], seconds, plain, reused)
        stored, row = reused.prefix, reused.sequences[0].tolist() + ids(32)
    result = {"device": f"cpu ({platform.machine()}), 1 thread", "torch": torch.__version__, "rows": result_rows}
    write_result(RESULTS / "caches_prefix.json", result)
    print(caches_prefix_table(result))


def answer_packaged(model: Model, examples: list[Example], **request: Any) -> tuple[float, float, float]:
    """Answer packaged prompts in batches of 16; return the share of right answers, and positions and forwards per
    answer."""
    right = positions = forwards = 0
    for begin in range(0, len(examples), 16):
        batch = examples[begin : begin + 16]
        out = paradec.generate(model, [example.prompt for example in batch], seed=0, **request)
        right += sum(TASKS[example.task].check(example, text) for example, text in zip(batch, out.text, strict=True))
        positions, forwards = positions + out.forwarded_tokens, forwards + sum(out.row_nfe)
    return right / len(examples), positions / len(examples), forwards / len(examples)


def accuracy(limit: int) -> None:
    """Measure accuracy with every cache and three samplers, in blocks of 16."""
    torch.set_num_threads(1)
    model = paradec.load()
    rules = {name: paradec.samplers.create(name) for name in ("low_confidence", "threshold", "random")}
    examples = load_prompts(None, limit=limit)
    settings = [(name, {}) for name in paradec.caches.names()] + list(VARIANTS)
    entries = {
        " ".join([name, *(f"{key}={value}" for key, value in options.items())]): (name, options)
        for name, options in settings
    }
    rows = []
    for rule, sampler in rules.items():
        for label, (name, options) in entries.items():
            cache = paradec.caches.create(name, **options)
            if verdict(sampler, cache, model.facts).status == REFUSED:
                continue
            request = {"sampler": sampler, "cache": cache, "max_new_tokens": 32, "block_length": 16}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                right, positions, forwards = answer_packaged(model, examples, **request)
            row = {"sampler": rule, "cache": label, "prompts": len(examples), "right": right}
            rows.append(row | {"positions_per_answer": positions, "forwards_per_answer": forwards})
            print(rows[-1], flush=True)
    result = {"model": "packaged", "block_length": 16, "rows": rows}
    write_result(RESULTS / "caches_accuracy.json", result)
    print(caches_accuracy_table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "accuracy", "prefix"))
    parser.add_argument("--limit", type=int, default=8, help="prompts per task")
    arguments = parser.parse_args()
    parts = {"speed": speed, "prefix": prefix, "accuracy": lambda: accuracy(arguments.limit)}
    parts[arguments.what]()


if __name__ == "__main__":
    main()
