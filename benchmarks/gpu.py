"""Checks and timings on one CUDA device: kernels, and whole decoding steps. Made for an H100 or H200; under 10 minutes.

    python benchmarks/gpu.py [--only statistics step sparsed] [--out benchmarks/results/gpu.json]

Every kernel is first checked against a float64 reference on fresh random inputs; then it is timed.

- statistics: bytes of logits per second, over those of a copy measured in the same run, and the speed-up over what the
  public codes do at temperature 0 (argmax, softmax in float64, gather).
- step: random models of LLaDA-8B's and Dream-7B's shape, bfloat16, a block of 32 over 1024 cached positions: forwards
  per second of paradec's loop ("eager") and of the captured step ("graphed"), as shares of what the memory (and at
  batch 8 the arithmetic) allows; how much of the graphed step is not the model; and as yardstick a loop as the public
  codes have it: all 1024 positions at every step, float64 softmax over them. Random weights make times, not texts.
- sparsed: see benchmarks/gpu_sparsed.py.

Writes one JSON file with the device's name and prints Markdown tables. Exit code 2 where there is no CUDA device, 1
where a check failed or a section broke off; both say so and print no table of what is missing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paradec
from paradec import engine
from paradec.kernels.token_stats import IN_ONE_READ, Draws, token_stats
from paradec.protocol import decode

ROOT = Path(__file__).resolve().parent.parent
BLOCK, CONTEXT = 32, 1024
PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.04e12, 312e12)}
"""Bytes and bfloat16 operations per second by the data sheets (SXM)."""
SHAPES = {
    "LLaDA-8B": {
        "prediction": "same",
        "mask": 126_336,
        "config": {
            "vocab_size": 126_464,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    },
    "Dream-7B": {
        "prediction": "shifted",
        "mask": 151_666,
        "config": {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    },
}


class CheckFailed(AssertionError):
    """A result that differs from its reference."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


def milliseconds(function: Callable[[int], Any], repeats: int = 20, warm_up: int = 3) -> float:
    """Median time on the device of function(i), which i tells to take other inputs each time."""
    for index in range(warm_up):
        function(index)
    pairs = []
    for index in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(index)
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of a copy of 2 GiB."""
    source = torch.empty(2**30, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (milliseconds(lambda _: target.copy_(source)) * 1e-3)


# ---- token statistics -----------------------------------------------------------------------------------------------


def check_statistics(device: torch.device) -> int:
    """The kernel against float64, over dtypes, odd vocabularies, strides, temperatures, splits; returns how many."""
    generator = torch.Generator(device).manual_seed(time.time_ns() % 2**31)
    done = 0
    for vocabulary in (8193, 50_257, 126_464, 152_064):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rows, temperature in ((1, 1.0), (37, 0.7), (300, 1.0)):
                wide = torch.randn(rows, vocabulary + 8, generator=generator, device=device)
                logits = (wide * torch.linspace(0.5, 9, rows, device=device).unsqueeze(1)).to(dtype)[:, :vocabulary]
                logits[:, 17] = -torch.inf
                logits[0, [5, vocabulary - 1]] = logits[0].max() + 1
                if rows > 1:
                    logits[1, 99] = torch.nan
                ids = torch.randint(vocabulary, (rows, 3), generator=generator, device=device)
                numbers = torch.randint(2**31, (rows, 4), generator=generator, device=device)
                draws = Draws(numbers[:, :2], numbers[:, 2] % 1000, numbers[:, 3] % 5000, 0.8)
                arguments = {"fields": tuple(IN_ONE_READ), "temperature": temperature, "ids": ids, "draws": draws}
                found = token_stats(logits, path="triton", **arguments)
                exact = token_stats(logits, path="float64", **arguments)
                what = f"token statistics of [{rows}, {vocabulary}] {dtype} at temperature {temperature}"
                good = ~exact.nonfinite
                check(torch.equal(found.nonfinite, exact.nonfinite), f"{what}: flags")
                check(torch.equal(found.token[good], exact.token[good]), f"{what}: tokens")
                check(torch.equal(found.sample[good], exact.sample[good]), f"{what}: samples")
                for name in (*sorted(IN_ONE_READ - {"token", "nonfinite"}), "ids_prob", "sample_prob"):
                    a, b = getattr(found, name)[good], getattr(exact, name)[good]
                    rel = 1e-5 if temperature == 1 else 1e-4
                    check(torch.allclose(a, b, rtol=rel, atol=1e-6), f"{what}: {name}")
                done += 1
    return done


def reference_statistics(logits: Tensor) -> Tensor:
    """What the public codes do at temperature 0."""
    token = logits.argmax(-1)
    return logits.to(torch.float64).softmax(-1).gather(-1, token.unsqueeze(-1))


def time_statistics(device: torch.device, copied: float) -> list[dict[str, Any]]:
    rows = []
    for vocabulary in (126_464, 152_064):
        for count in (32, 256, 1024):
            # together larger than the second-level cache several times over
            many = max(2, int(4e8) // (2 * count * vocabulary))
            logits = [torch.randn(count, vocabulary, device=device).bfloat16() for _ in range(many)]
            kernel = milliseconds(
                lambda i, x=logits: token_stats(x[i % len(x)], fields=tuple(IN_ONE_READ), path="triton")
            )
            plain = milliseconds(lambda i, x=logits: reference_statistics(x[i % len(x)]), repeats=5)
            rate = logits[0].nbytes / (kernel * 1e-3)
            rows.append(
                {
                    "vocabulary": vocabulary,
                    "rows": count,
                    "kernel_ms": kernel,
                    "reference_ms": plain,
                    "bytes_per_second": rate,
                    "of_copy": rate / copied,
                    "speed_up": plain / kernel,
                }
            )
    return rows


def run_statistics(device: torch.device, copied: float) -> dict[str, Any]:
    checks = check_statistics(device)
    return {"checks": checks, "rows": time_statistics(device, copied)}


# ---- whole steps ----------------------------------------------------------------------------------------------------


def check_steps(device: torch.device) -> int:
    """Captured decoding against the plain loop on small random models in float64: the same tokens and counts."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "vocab_size": 41,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.4,
    }
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14], [20, 21, 22]]
    done = 0
    for module, prediction in (
        (LlamaForCausalLM(LlamaConfig(**sizes)), "same"),
        (Qwen2ForCausalLM(Qwen2Config(**sizes)), "shifted"),
    ):
        model = paradec.wrap(
            module.double().to(device),
            mask_token_id=40,
            eos_token_id=(39, 7, 21),
            prediction=prediction,
            topology="bidirectional",
        )
        for name in sorted(engine.SAMPLERS):
            for cache in sorted(engine.CACHES):
                sampler = paradec.samplers.create(name)
                request = {"max_new_tokens": 16, "block_length": 8, "seed": 1, "cache": cache, "temperature": 0.7}
                plain, graphed = sampler.start(model, prompts, **request), sampler.start(model, prompts, **request)
                decode(sampler, model, plain)
                engine.decode(sampler, model, graphed)
                what = f"captured {name} with cache {cache}, prediction {prediction}"
                check(torch.equal(plain.canvas, graphed.canvas), f"{what}: tokens")
                check(bool((plain.counts == graphed.counts).all()), f"{what}: counts")
                done += 1
    return done


def build(name: str, device: torch.device) -> Any:
    """A random model of a published shape."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shape = SHAPES[name]
    config, module = (
        (LlamaConfig, LlamaForCausalLM) if shape["prediction"] == "same" else (Qwen2Config, Qwen2ForCausalLM)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            made = module(config(**shape["config"], max_position_embeddings=4096, tie_word_embeddings=False))
    finally:
        torch.set_default_dtype(before)
    return paradec.wrap(
        made,
        mask_token_id=shape["mask"],
        eos_token_id=(),
        prediction=shape["prediction"],
        topology="bidirectional",
    )


def roofline(model: Any, batch: int, peaks: tuple[float, float]) -> float:
    """Forwards per second at best: the weights and the stored keys and values are read once, every weight takes two
    operations per position."""
    config = model.module.config
    embedded = model.module.get_input_embeddings().weight.numel()
    weights = sum(parameter.numel() for parameter in model.module.parameters()) - embedded
    head = config.hidden_size // config.num_attention_heads
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * head * (CONTEXT + BLOCK) * batch
    attended = 4 * config.num_hidden_layers * config.hidden_size * (CONTEXT + BLOCK) * BLOCK * batch
    return 1 / max(2 * (weights + kept) / peaks[0], (2 * weights * BLOCK * batch + attended) / peaks[1])


def time_steps(model: Any, batch: int, peaks: tuple[float, float]) -> dict[str, float]:
    """Steps inside a block, after the forward that opened it."""
    sampler = paradec.samplers.create("threshold")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, (batch, CONTEXT), generator=generator).tolist()

    def start() -> Any:
        return sampler.start(model, prompt, max_new_tokens=BLOCK, block_length=BLOCK, cache="dual")

    state = start()
    forward, times = [], []
    with torch.inference_mode(), state.freed_store():
        while not state.done:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            sampler.commit(state, sampler.step(model, state))
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        eager_canvas = state.canvas.clone()
    eager = statistics.median(times[3:])

    state = start()
    with torch.inference_mode(), state.freed_store():
        device = engine.Engine(sampler, model, state, capture=True)
        device._play("full", batch, state.canvas.shape[1])
        width = device._width(int(device.flags[2]))
        device._play("window", batch, width)  # captured here
        times = []
        while device.running.any():
            begin = time.perf_counter()
            device._play("window", batch, width)
            device.flags.tolist()  # what the host waits for at every step
            times.append(time.perf_counter() - begin)
        graphed = statistics.median(times[1:])
        # surplus steps take the same time, and change nothing
        replayed = milliseconds(lambda _: device._play("window", batch, width)) * 1e-3
        device.write_back()
        same = torch.equal(eager_canvas, state.canvas)
        rows = torch.arange(batch, device=state.canvas.device)
        device._window(rows)
        query, _ = device._query("window", rows, device.running, device.length, width)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=device.pool):
            model(query, state.store)
        forward = milliseconds(lambda _: graph.replay()) * 1e-3

    mask, x = model.facts.mask_token_id, torch.tensor(prompt, device=eager_canvas.device)
    x[:, -BLOCK:] = mask

    def plain(_: int) -> None:
        logits = model.module(input_ids=x, use_cache=False).logits
        token = logits.argmax(-1)
        confidence = logits.to(torch.float64).softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        confidence = torch.where(x == mask, confidence, -torch.inf)
        at = confidence.argmax(1, keepdim=True)
        x.scatter_(1, at, token.gather(1, at))

    with torch.inference_mode():
        yardstick = milliseconds(plain, repeats=6, warm_up=2) * 1e-3
    best = roofline(model, batch, peaks)
    return {
        "batch": batch,
        "roofline_per_second": best,
        "eager_per_second": 1 / eager,
        "graphed_per_second": 1 / graphed,
        "replayed_per_second": 1 / replayed,
        "plain_loop_per_second": 1 / yardstick,
        "eager_of_roofline": 1 / eager / best,
        "graphed_of_roofline": 1 / graphed / best,
        "outside_model": 1 - forward / graphed,
        "graphed_over_plain_loop": yardstick / graphed,
        "same_tokens_as_eager": same,
    }


def run_steps(device: torch.device, peaks: tuple[float, float]) -> dict[str, Any]:
    result: dict[str, Any] = {"checks": check_steps(device), "rows": []}
    for name in SHAPES:
        model = build(name, device)
        for batch in (1, 8):
            result["rows"].append({"model": name, **time_steps(model, batch, peaks)})
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return result


# ---- together -------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one kind as Markdown."""
    names = list(rows[0])

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row[name]) for name in names) + " |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("statistics", "step", "sparsed")
    parser.add_argument("--only", nargs="*", choices=sections, default=sections)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked and nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    copied = copy_bandwidth(device)
    known = next((peaks for key, peaks in PEAKS.items() if key in name), None)
    peaks = known or (copied, float("inf"))
    result: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_bytes_per_second": copied,
        "peaks": "data sheet" if known else "the measured copy",
    }
    print(f"{name}: a copy moves {copied / 1e12:.2f} TB/s")

    def sparsed() -> dict[str, Any]:
        return importlib.import_module("gpu_sparsed").run(device)

    runs = {
        "statistics": lambda: run_statistics(device, copied),
        "step": lambda: run_steps(device, peaks),
        "sparsed": sparsed,
    }
    failed = []
    for section in arguments.only:
        begin = time.perf_counter()
        try:
            result[section] = runs[section]()
        except Exception:  # the others are worth having: devices are rare
            failed.append(section)
            traceback.print_exc()
            continue
        result[section]["seconds"] = time.perf_counter() - begin
        print(f"\n{section}: checked, {result[section]['seconds']:.0f} s\n")
        for value in result[section].values():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                print(table(value) + "\n")
    if failed:
        result["failed"] = failed
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out}")
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
