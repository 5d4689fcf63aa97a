"""`compile=True` on a CPU: statistics, whole forwards, steps, what compiling takes, and tokens in other dtypes.

    python benchmarks/cpu_compile.py [--repeats 15] [--only statistics forwards ...]

One thread. Everything that is compared takes turns within one run; times are the process's own (`time.process_time`)
and by the clock on the wall, medians with quartiles over the turns, and factors are medians of ratios within a turn, of
the process's own times.

- statistics: margin and entropy of float32 logits [8 or 32, V], compiled and not, beside one softmax of the same logits
  into memory that is kept (new memory makes it take twice as long);
- forwards: a Llama with random weights (12 heads of 64, 6 layers, 32,000 words), one row: whole forwards over 128 and
  256 positions, and the cached steps of 32 positions over 256 (`dual`); compiled and not, beside its matrix products
  alone, and beside these with attention. In float32 and bfloat16;
- steps: what `threshold` and `entropy` do with the logits [1, 32, 126,464] of a step, compiled and not; and of that the
  selection alone;
- compiling: wall and process time of a first request with the packaged model, with an empty cache folder and with a
  filled one, each in a process of its own (the C++ compiler's own time apart);
- tokens: answers of the packaged model to the packaged prompts that are the same in float32 and bfloat16, and in
  float32 compiled and not.

Writes benchmarks/results/cpu_compile.json, with the commit that was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from token_stats import in_turns, summary
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec import compiling, samplers
from paradec.evaluation.tasks import load_prompts
from paradec.kernels.token_stats import token_stats
from paradec.kernels.token_stats.compiled import CompiledSums, serving
from paradec.models.compiled import compiled_calls
from paradec.models.layout import lay_columns_first

ROOT = Path(__file__).resolve().parent.parent
VOCABULARIES = (126_464, 152_064)
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
WORDS = 32_000


def compared(functions: dict[str, Callable[[], Any]], base: str, repeats: int) -> dict[str, Any]:
    """Times of all functions, and their ratios to those of `base`."""
    times = in_turns(functions, repeats)
    return {name: summary(each, times[base]) for name, each in times.items()}


def statistics_part(repeats: int) -> list[dict[str, Any]]:
    found = []
    for words, rows in itertools.product(VOCABULARIES, (8, 32)):
        logits = 4 * torch.randn(rows, words, generator=torch.Generator().manual_seed(0))
        sums, kept = CompiledSums(), torch.empty_like(logits)

        def compiled(logits: Tensor = logits, sums: CompiledSums = sums) -> Any:
            with serving(sums):
                return token_stats(logits, fields=("margin", "entropy"))

        functions: dict[str, Callable[[], Any]] = {
            "softmax": lambda logits=logits, kept=kept: torch.softmax(logits, -1, out=kept),  # type: ignore[misc]
            "uncompiled": lambda logits=logits: token_stats(logits, fields=("margin", "entropy")),  # type: ignore[misc]
            "compiled": compiled,
        }
        with compiling.kept(), torch.inference_mode():
            times = compared(functions, "softmax", repeats)
            wide = token_stats(logits.double(), fields=("entropy",)).entropy
            error = float((compiled().entropy / wide - 1).abs().max())
        found.append({"vocabulary": words, "rows": rows, "times": times, "entropy_error": error})
    return found


def random_model(words: int, dtype: torch.dtype, **sizes: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=words, max_position_embeddings=512, **(SIZES | sizes))
    module = LlamaForCausalLM(config).to(dtype)
    lay_columns_first(module)  # as `paradec.load` does
    return paradec.wrap(module, mask_token_id=words - 1, prediction="same", topology="bidirectional")


def products(module: Any, columns: int, wanted: int, dtype: torch.dtype) -> Callable[[], None]:
    """The matrix products of a forward, and nothing else."""
    weights = [part.weight for layer in module.model.layers for part in layer.modules() if hasattr(part, "in_features")]
    inputs = {size: torch.randn(columns, size).to(dtype) for size in {weight.shape[1] for weight in weights}}
    last = torch.randn(wanted, module.config.hidden_size).to(dtype)

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(last, module.lm_head.weight)

    return run


def with_attention(run: Callable[[], None], module: Any, columns: int, keys: int, dtype: torch.dtype) -> Any:
    """The same, and after it every layer's attention over dense keys and values, which has two products of its own."""
    config = module.config
    query = torch.randn(1, config.num_attention_heads, columns, config.head_dim).to(dtype)
    key, value = torch.randn(2, 1, config.num_attention_heads, keys, config.head_dim).to(dtype)

    def both() -> None:
        run()
        for _ in module.model.layers:
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

    return both


def forwards_part(repeats: int) -> list[dict[str, Any]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(WORDS, dtype)
        method: Any = samplers.create("low_confidence")
        for name, length, cache in (("whole", 128, "none"), ("whole", 256, "none"), ("cached", 256, "dual")):
            ids = list(range(length - 64))
            state = method.start(model, ids, max_new_tokens=64, block_length=32, cache=cache, steps=64)
            with torch.inference_mode():
                if cache != "none":
                    method.commit(state, method.step(model, state))
                (query,) = method.query(state)

                def plain(model: Any = model, query: Any = query, state: Any = state) -> Tensor:
                    return model(query, state.store)

                def compiled(model: Any = model, query: Any = query, state: Any = state) -> Tensor:
                    with compiled_calls(model, layers=True, statistics=False):
                        return model(query, state.store)

                run = products(model.module, query.tokens.shape[1], query.wanted.shape[1], dtype)
                difference = float((plain() - compiled()).abs().max())
                both = with_attention(run, model.module, query.tokens.shape[1], length, dtype)
                functions = {"products": run, "with attention": both, "uncompiled": plain, "compiled": compiled}
                seconds = in_turns(functions, repeats)
                times = {name: summary(each, seconds["products"]) for name, each in seconds.items()}
                over_both = {name: summary(seconds[name], seconds["with attention"]) for name in list(seconds)[2:]}
                gain = summary(seconds["uncompiled"], seconds["compiled"])
            found.append(
                {
                    "call": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "positions": query.tokens.shape[1],
                    "of": length,
                    "times": times,
                    "over_products_and_attention": over_both,
                    "speed_up": gain["times_base"],
                    "speed_up_quartiles": gain["times_base_quartiles"],
                    "largest_difference": difference,
                }
            )
    return found


def steps_part(repeats: int) -> list[dict[str, Any]]:
    found = []
    model = random_model(VOCABULARIES[0], torch.float32, hidden_size=48, num_hidden_layers=1, intermediate_size=48)
    for name in ("threshold", "entropy"):
        method: Any = samplers.create(name)
        state = method.start(model, list(range(32)), max_new_tokens=32, block_length=32)
        with torch.inference_mode():
            queries = method.query(state)
            logits = model(queries[0], state.store)
            sums, kept = CompiledSums(), torch.empty_like(logits)

            def propose(method: Any = method, state: Any = state, logits: Any = logits, queries: Any = queries) -> Any:
                return method.propose(state, [logits], queries)

            def compiled(propose: Any = propose, sums: CompiledSums = sums) -> Any:
                with serving(sums):
                    return propose()

            view = method._view(state, propose(), {}, None)
            functions: dict[str, Callable[[], Any]] = {
                "softmax": lambda logits=logits, kept=kept: torch.softmax(logits, -1, out=kept),  # type: ignore[misc]
                "uncompiled": propose,
                "compiled": compiled,
                "selection": lambda method=method, view=view: method.select(view),  # type: ignore[misc]
            }
            with compiling.kept():
                found.append({"sampler": name, "times": compared(functions, "softmax", repeats)})
    return found


def first_request() -> None:
    """In a process of its own: load, decode once compiled, and print what that took."""
    torch.set_num_threads(1)
    model = paradec.load()
    before, own = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time()
    out = paradec.generate(model, "Sort: pear fig apple", max_new_tokens=16, compile=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    again = paradec.generate(model, "Sort: pear fig apple", max_new_tokens=16, compile=True)
    plain = paradec.generate(model, "Sort: pear fig apple", max_new_tokens=16)
    compiler = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = {"wall_s": out.compile_seconds, "process_s": time.process_time() - own, "compiler_s": compiler}
    print(json.dumps(said | {"next_s": again.seconds, "uncompiled_s": plain.seconds}))


def compiling_part() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {compiling.FOLDER: folder}
        environment.pop(compiling.TORCHS_FOLDER, None)
        for name in ("empty folder", "filled folder"):
            command = [sys.executable, __file__, "--first-request"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout)
        found["folder_mb"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6
    return found


def tokens_part(limit: int | None) -> dict[str, Any]:
    prompts = [example.prompt for example in load_prompts(limit=limit)]
    arguments: dict[str, Any] = {"max_new_tokens": 32}

    def answers(model: Any, **more: Any) -> Tensor:
        found = [paradec.generate(model, prompt, **arguments, **more).new_tokens for prompt in prompts]
        return torch.cat(found)

    model = paradec.load(dtype="float32")
    single, found = answers(model), {}
    others = {"bfloat16": answers(paradec.load(dtype="bfloat16")), "float32, compiled": answers(model, compile=True)}
    for name, other in others.items():
        same = single == other
        found[name] = {"equal_answers": float(same.all(1).float().mean()), "equal_tokens": float(same.float().mean())}
    return {"prompts": len(prompts)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("forwards", "statistics", "steps", "compiling", "tokens")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--prompts", type=int, help="at most so many prompts for the tokens")
    parser.add_argument("--first-request", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_request:
        first_request()
        return
    torch.set_num_threads(1)
    path = ROOT / "benchmarks" / "results" / "cpu_compile.json"
    runs: dict[str, Callable[[], Any]] = {
        "statistics": lambda: statistics_part(arguments.repeats),
        "forwards": lambda: forwards_part(arguments.repeats),
        "steps": lambda: steps_part(arguments.repeats),
        "compiling": compiling_part,
        "tokens": lambda: tokens_part(arguments.prompts),
    }
    device = f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}), 1 thread"
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "repeats": arguments.repeats}
    for name in arguments.only:
        result[name] = runs[name]()
        print(name, json.dumps(result[name], indent=1), flush=True)
        write_result(path, result)
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
