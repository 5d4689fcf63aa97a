"""Checks and timings on one CUDA device: kernels, and whole decoding steps. Made for an H100 or H200; under 10 minutes.

    python benchmarks/gpu.py [--only statistics step sparsed] [--out benchmarks/results/gpu.json]
    python benchmarks/gpu.py --dry-run    # on a CPU: the same code with tiny shapes, only to find typing errors

Every kernel is checked against a float64 reference on new random inputs, then timed.

- statistics: bytes of logits per second, as a share of a copy's in the same run, and the speed-up over the public
  codes' statistics at temperature 0 (argmax, softmax in float64, gather).
- step: random models of LLaDA-8B's and Dream-7B's shape, bfloat16, a block of 32 at the end of 1024 positions with
  stored keys and values. Measured: forwards per second of paradec's loop ("eager") and of the captured step
  ("graphed"), also as shares of the roofline; the share of the graphed step outside of the model; the step with rows
  shorter than the canvas ("padded": attention with a mask); a request that captures its graphs, and a second request
  that reuses them. For comparison, a loop like the public codes' evaluates all 1024 positions at every step, with a
  float64 softmax. Random weights are enough for times.
- sparsed: see benchmarks/gpu_sparsed.py.

Writes one JSON file with the device's name; without --out also the tables of docs/results.md. "problems" in the JSON
file lists failures, and measurements for which a section's time was too short. The exit code is 2 without a CUDA
device, 1 with a problem. A dry run writes no tables, and JSON only with --out; it runs the kernels if
TRITON_INTERPRET=1 is set, otherwise PyTorch code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_sparsed
import numpy as np
import torch
from tables import replace_marked
from timing import Section, markdown, milliseconds
from torch import Tensor

import paradec
from paradec.batching.batch import Batch
from paradec.core.protocol import decode
from paradec.core.query import Query
from paradec.kernels.token_stats import IN_ONE_READ, TokenDraws, interpreting, reference_stats, token_stats
from paradec.samplers.masked.device import graphs
from paradec.samplers.masked.device import step as device_step
from paradec.samplers.masked.device.engine import DeviceEngine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.04e12, 312e12)}
"""Bytes and bfloat16 operations per second by the data sheets (SXM)."""
SHAPES = {
    "LLaDA-8B": {
        "prediction": "same", "mask": 126_336,
        "config": {"vocab_size": 126_464, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 32},
    },
    "Dream-7B": {
        "prediction": "shifted", "mask": 151_666,
        "config": {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4},
    },
}  # fmt: skip
TINY = {
    "vocab_size": 9000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def _with_device_step(registry: Any) -> list[str]:
    """List the samplers or caches that the device step supports."""
    return [name for name in registry.names() if getattr(registry.get(name), "device_step", False)]


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements; with `DRY` the same code runs in seconds, on a CPU."""

    checked_vocabularies: tuple[int, ...] = (8193, 50_257, 126_464, 152_064)
    checked_rows: tuple[tuple[int, float], ...] = ((1, 1.0), (37, 0.7), (300, 1.0))
    """(Number of rows, temperature) of each check."""
    vocabularies: tuple[int, ...] = (126_464, 152_064)
    rows: tuple[int, ...] = (32, 256, 1024)
    working_set: int = 800_000_000
    """Total bytes of the logits tensors that are read in turn: several times the second-level cache."""
    copied: int = 2**31
    """Number of bytes copied to measure bandwidth."""
    samplers: tuple[str, ...] = tuple(sorted(_with_device_step(paradec.samplers)))
    batches: tuple[int, ...] = (1, 8)
    block: int = 32
    context: int = 1024
    repeats: int = 20
    dtype: torch.dtype = torch.bfloat16
    tiny: bool = False


DRY = Scale(
    checked_vocabularies=(8193,), checked_rows=((1, 1.0), (3, 0.7)), vocabularies=(9000,), rows=(2,), working_set=10**5,
    copied=2**16, samplers=("entropy", "threshold"), batches=(1, 2), block=8, context=64, repeats=2,
    dtype=torch.float32, tiny=True,
)  # fmt: skip


def check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def copy_bandwidth(device: torch.device, scale: Scale) -> float:
    """Measure the memory bandwidth of a copy: bytes read plus bytes written, per second."""
    source = torch.empty(scale.copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * scale.copied / (milliseconds(lambda _: target.copy_(source), device, scale.repeats) * 1e-3)


def kernel_path(device: torch.device) -> str:
    return "triton" if device.type == "cuda" or interpreting() else "chunked"


# ---- token statistics -----------------------------------------------------------------------------------------------


def check_statistics(device: torch.device, scale: Scale) -> int:
    """Check the kernel against float64, for several dtypes, vocabularies, strides and temperatures; return the number
    of checks."""
    generator = torch.Generator(device).manual_seed(time.time_ns() % 2**31)
    num_checks = 0
    for vocabulary in scale.checked_vocabularies:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rows, temperature in scale.checked_rows:
                wide = torch.randn(rows, vocabulary + 8, generator=generator, device=device)
                logits = (wide * torch.linspace(0.5, 9, rows, device=device).unsqueeze(1)).to(dtype)[:, :vocabulary]
                logits[:, 17] = -torch.inf
                logits[0, [5, vocabulary - 1]] = logits[0].max() + 1
                if rows > 1:
                    logits[1, 99] = torch.nan
                ids = torch.randint(vocabulary, (rows, 3), generator=generator, device=device)
                numbers = torch.randint(2**31, (rows, 4), generator=generator, device=device)
                draws = TokenDraws(numbers[:, :2], numbers[:, 2] % 1000, numbers[:, 3] % 5000, 0.8)
                arguments = {"temperature": temperature, "ids": ids, "draws": draws}
                stats = token_stats(logits, fields=tuple(IN_ONE_READ), path=kernel_path(device), **arguments)
                exact = reference_stats(logits, **arguments)
                what = f"token statistics of [{rows}, {vocabulary}] {dtype} at temperature {temperature}"
                good = ~exact.nonfinite
                check(torch.equal(stats.nonfinite, exact.nonfinite), f"{what}: flags")
                check(torch.equal(stats.token[good], exact.token[good]), f"{what}: tokens")
                check(torch.equal(stats.sample[good], exact.sample[good]), f"{what}: samples")
                for name in (*sorted(IN_ONE_READ - {"token", "nonfinite"}), "ids_prob", "sample_prob"):
                    a, b = getattr(stats, name)[good], getattr(exact, name)[good]
                    rel = 1e-5 if temperature == 1 else 1e-4
                    check(torch.allclose(a, b, rtol=rel, atol=1e-6), f"{what}: {name}")
                num_checks += 1
    return num_checks


def reference_statistics(logits: Tensor) -> Tensor:
    """Compute the statistics as the public codes do at temperature 0."""
    token = logits.argmax(-1)
    return logits.to(torch.float64).softmax(-1).gather(-1, token.unsqueeze(-1))


def time_statistics(vocabulary: int, count: int, device: torch.device, copied: float, scale: Scale) -> dict[str, float]:
    num = max(2, scale.working_set // (2 * count * vocabulary))
    logits = [torch.randn(count, vocabulary, device=device).bfloat16() for _ in range(num)]
    fields, path = tuple(IN_ONE_READ), kernel_path(device)
    kernel = milliseconds(lambda i: token_stats(logits[i % num], fields=fields, path=path), device, scale.repeats)
    plain = milliseconds(lambda i: reference_statistics(logits[i % num]), device, min(5, scale.repeats))
    rate = logits[0].nbytes / (kernel * 1e-3)
    return {
        "kernel_ms": kernel,
        "reference_ms": plain,
        "bytes_per_second": rate,
        "of_copy": rate / copied,
        "speed_up": plain / kernel,
    }


def run_statistics(section: Section, device: torch.device, copied: float, scale: Scale) -> dict[str, Any]:
    rows = []
    checks = section.attempt("checks of the statistics", lambda: check_statistics(device, scale))
    for vocabulary in scale.vocabularies:
        for count in scale.rows:
            what = {"vocabulary": vocabulary, "rows": count}
            entry = section.attempt(
                f"statistics {what}", lambda v=vocabulary, c=count: time_statistics(v, c, device, copied, scale)
            )
            if entry is not None:
                rows.append(what | entry)
    return section.close(checks=checks, rows=rows)


# ---- whole steps ----------------------------------------------------------------------------------------------------


def check_steps(device: torch.device, scale: Scale) -> int:
    """Check that captured decoding and the plain loop give equal tokens and counts, on small random models in float64,
    for two requests in sequence and for a refilled batch. Returns the number of checks."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.4,
    }  # fmt: skip
    prompts = [[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14], [20, 21, 22]], [[5], [6, 7], [8, 9, 10], [11] * 9]]
    num_checks = 0
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
        for name in scale.samplers:
            for cache in sorted(_with_device_step(paradec.caches)):
                sampler = paradec.samplers.create(name)
                request = {"max_new_tokens": 16, "block_length": 8, "seed": 1, "cache": cache, "temperature": 0.7}
                for rows in prompts:
                    plain, graphed = (sampler.start(model, rows, **request) for _ in range(2))
                    decode(sampler, model, plain)
                    device_step.decode(sampler, model, graphed, capture=device.type == "cuda")
                    what = f"captured {name} with cache {cache}, prediction {prediction}"
                    check(torch.equal(plain.canvas, graphed.canvas), f"{what}: tokens")
                    check(bool((plain.counts == graphed.counts).all()), f"{what}: counts")
                    num_checks += 1
        request = {"sampler": "threshold", "cache": "dual", "block_length": 8, "seed": 1, "temperature": 0.7}
        batch = Batch(model, batch_size=2, compile=device.type == "cuda", **request)  # slots that are refilled
        lengths = (16, 5, 30, 9)
        tickets = [batch.add(row, max_new_tokens=new, alone=True) for row, new in zip(prompts[0], lengths)]
        while batch.occupied or batch.waiting:
            batch.step()
        for ticket, row, new in zip(tickets, prompts[0], lengths):
            alone = paradec.generate(model, input_ids=[row], max_new_tokens=new, **request)
            same = torch.equal(ticket.output.new_tokens, alone.new_tokens)
            check(same, f"captured steps of a batch that is refilled, prediction {prediction}: tokens")
            num_checks += 1
    return num_checks


def build(name: str, device: torch.device, scale: Scale) -> Any:
    """Build a random model of a published shape."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shape = SHAPES[name]
    config, module = (
        (LlamaConfig, LlamaForCausalLM) if shape["prediction"] == "same" else (Qwen2Config, Qwen2ForCausalLM)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(scale.dtype)
    sizes = TINY if scale.tiny else shape["config"]
    try:
        with device:
            made = module(config(**sizes, max_position_embeddings=4096, tie_word_embeddings=False))
    finally:
        torch.set_default_dtype(before)
    return paradec.wrap(
        made.eval(),
        mask_token_id=sizes["vocab_size"] - 1 if scale.tiny else shape["mask"],
        eos_token_id=(),
        prediction=shape["prediction"],
        topology="bidirectional",
    )


def roofline(model: Any, batch: int, peaks: tuple[float, float], scale: Scale) -> float:
    """Compute an upper bound of forwards per second, from `peaks` (bytes per second, operations per second): weights
    and stored keys and values are read once, and every weight takes two operations per position."""
    config = model.module.config
    embedded = model.module.get_input_embeddings().weight.numel()
    weights = sum(parameter.numel() for parameter in model.module.parameters()) - embedded
    head = config.hidden_size // config.num_attention_heads
    stored = 2 * config.num_hidden_layers * config.num_key_value_heads * head * scale.context * batch
    attended = 4 * config.num_hidden_layers * config.hidden_size * scale.context * scale.block * batch
    return 1 / max(2 * (weights + stored) / peaks[0], (2 * weights * scale.block * batch + attended) / peaks[1])


class Steps:
    """Timings of steps of one model at one batch size. The first forward of the block, over the prompt, is left out."""

    def __init__(self, model: Any, batch: int, scale: Scale):
        self.model, self.batch, self.scale, self.device = model, batch, scale, model.device
        self.sampler = paradec.samplers.create("threshold")
        generator = torch.Generator().manual_seed(0)
        shape = (batch, scale.context - scale.block)
        self.prompt = torch.randint(1000, shape, generator=generator).tolist()
        self.canvas: Tensor | None = None

    def start(self, shorter: int = 0) -> Any:
        prompt = [row[shorter:] for row in self.prompt]
        return self.sampler.start(
            self.model, prompt, max_new_tokens=self.scale.block, block_length=self.scale.block, cache="dual"
        )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def eager(self) -> dict[str, float]:
        state, times = self.start(), []
        with torch.inference_mode(), state.release_stores_on_exit():
            while not state.done:
                self.wait()
                begin = time.perf_counter()
                self.sampler.commit(state, self.sampler.step(self.model, state))
                self.wait()
                times.append(time.perf_counter() - begin)
            self.canvas = state.canvas.clone()
        return {"eager_per_second": 1 / statistics.median(times[min(3, len(times) - 1) :])}

    def graphed(self, shorter: int = 0) -> dict[str, Any]:
        """Time captured steps, each with the host's wait; also return the share of time outside the model, and whether
        the tokens equal those of `eager`. With `shorter`, prompts lack that many tokens; only the rate is returned."""
        state, batch = self.start(shorter), self.batch
        with torch.inference_mode():
            table = graphs.block_table(state)
            layout = graphs.StepLayout.from_state(self.sampler, state, table[0], self.device.type == "cuda")
            device = DeviceEngine(layout)
            device.load(self.model, state, table)
            device._run_step("full", batch, device.columns)
            width = device.max_block_length + device.facts.shift  # positions that the cache `dual` evaluates per step
            device._run_step("window", batch, width)  # captured here
            times = []
            while device.running.any():
                begin = time.perf_counter()
                device._run_step("window", batch, width)
                device.flags.tolist()  # the host waits for these at every step
                times.append(time.perf_counter() - begin)
            # additional steps take the same time, and change nothing
            replayed = milliseconds(lambda _: device._run_step("window", batch, width), self.device, self.scale.repeats)
            seconds = statistics.median(times[1:]) if len(times) > 1 else replayed * 1e-3
            if shorter:
                return {"padded_per_second": 1 / seconds}
            device.write_back(state)
            rows = torch.arange(batch, device=self.device)
            device._window(rows)
            query, _ = device._query("window", rows, device.running, device.length, width)
            forward: Any = lambda: self.model(query, device.store)  # noqa: E731
            if layout.capture:
                forward = graphs.capture_graph(device, forward)
            alone = milliseconds(lambda _: forward(), self.device, self.scale.repeats) * 1e-3
        return {
            "graphed_per_second": 1 / seconds,
            "replayed_per_second": 1e3 / replayed,
            "outside_model": 1 - alone / seconds,
            "same_tokens_as_eager": None if self.canvas is None else torch.equal(self.canvas, state.canvas),
        }

    def requests(self) -> dict[str, float]:
        """Time a whole request that captures its graphs, and a second one that reuses them."""
        seconds = []
        for _ in range(2):
            state = self.start()
            self.wait()
            begin = time.perf_counter()
            device_step.decode(self.sampler, self.model, state, capture=self.device.type == "cuda")
            self.wait()
            seconds.append(time.perf_counter() - begin)
        device_step.clear_graphs(self.model)
        return {"first_request_seconds": seconds[0], "next_request_seconds": seconds[1]}

    def plain(self) -> dict[str, float]:
        """Time a loop like those of the public codes, without stored keys and values."""
        model, block, mask = self.model, self.scale.block, self.model.facts.mask_token_id
        x = torch.full((self.batch, self.scale.context), mask, device=self.device)
        x[:, :-block] = torch.tensor(self.prompt, device=self.device)
        positions = torch.arange(self.scale.context, device=self.device).expand(self.batch, -1)
        query = Query(rows=np.arange(self.batch), tokens=x, positions=positions)

        def step(_: int) -> None:
            logits = model(query)
            token = logits.argmax(-1)
            confidence = logits.to(torch.float64).softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
            confidence = torch.where(x == mask, confidence, -torch.inf)
            position = confidence.argmax(1, keepdim=True)
            x.scatter_(1, position, token.gather(1, position))

        with torch.inference_mode():
            return {"plain_loop_per_second": 1e3 / milliseconds(step, self.device, min(6, self.scale.repeats), 2)}


def time_steps(section: Section, name: str, model: Any, batch: int, peaks: Any, scale: Scale) -> dict[str, Any]:
    steps = Steps(model, batch, scale)
    best = roofline(model, batch, peaks, scale)
    row: dict[str, Any] = {"model": name, "batch": batch, "roofline_per_second": best}
    for what, run in (
        ("eager", steps.eager),
        ("graphed", steps.graphed),
        ("padded", lambda: steps.graphed(shorter=1)),
        ("plain loop", steps.plain),
        ("requests", steps.requests),
    ):
        row |= section.attempt(f"{name}, batch {batch}, {what}", run) or {}
    for kind in ("eager", "graphed"):
        if f"{kind}_per_second" in row:
            row[f"{kind}_of_roofline"] = row[f"{kind}_per_second"] / best
    if "graphed_per_second" in row and "plain_loop_per_second" in row:
        row["graphed_over_plain_loop"] = row["graphed_per_second"] / row["plain_loop_per_second"]
    return row


def run_steps(section: Section, device: torch.device, peaks: tuple[float, float], scale: Scale) -> dict[str, Any]:
    rows = []
    checks = section.attempt("checks of the steps", lambda: check_steps(device, scale))
    for name in SHAPES:
        model = section.attempt(f"model {name}", lambda name=name: build(name, device, scale))
        if model is not None:
            rows += [time_steps(section, name, model, batch, peaks, scale) for batch in scale.batches]
        del model
    return section.close(checks=checks, rows=rows)


# ---- together -------------------------------------------------------------------------------------------------------


HEADINGS = {"statistics": "Token statistics", "step": "Whole steps", "sparsed": "SparseD"}


def tables(result: dict[str, Any]) -> str:
    """Format the measurements as Markdown."""
    parts = [
        f"On one {result['device']}, torch {result['torch']}; a copy moves {result['copy_bytes_per_second']:.3g} B/s."
    ]
    for section, heading in HEADINGS.items():
        rows = result.get(section, {}).get("rows")
        if rows:
            parts += [f"{heading}:", markdown(rows)]
    problems = [problem for section in HEADINGS for problem in result.get(section, {}).get("problems", ())]
    if problems:
        parts.append("Not measured: " + "; ".join(" ".join(problem.split()) for problem in problems) + ".")
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=tuple(HEADINGS), default=tuple(HEADINGS))
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}, and the tables with it")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU; times mean nothing")
    arguments = parser.parse_args()
    dry = arguments.dry_run
    if not dry and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked or measured", file=sys.stderr)
        return 2
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    name = "CPU (a dry run: times mean nothing)" if dry else torch.cuda.get_device_name(device)
    scale = DRY if dry else Scale()
    copied = copy_bandwidth(device, scale)
    known = next((peaks for key, peaks in PEAKS.items() if key in name), None)
    result: dict[str, Any] = {
        "device": name,
        "dry_run": dry,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_bytes_per_second": copied,
        "peaks": "data sheet" if known else "the measured copy",
    }
    print(f"{name}: a copy moves {copied / 1e12:.2f} TB/s", flush=True)
    peaks = known or (copied, float("inf"))
    seconds = {"statistics": 90, "step": 220, "sparsed": 140}  # together less than ten minutes

    def section_of(name: str) -> Section:
        return Section(float("inf") if dry else seconds[name])

    runs = {
        "statistics": lambda: run_statistics(section_of("statistics"), device, copied, scale),
        "step": lambda: run_steps(section_of("step"), device, peaks, scale),
        "sparsed": lambda: gpu_sparsed.run(
            section_of("sparsed"), device, gpu_sparsed.DRY if dry else gpu_sparsed.Scale()
        ),
    }
    for section in arguments.only:
        result[section] = runs[section]()
        print(f"{section}: {result[section]['seconds']:.0f} s, {len(result[section]['problems'])} problems", flush=True)
    print("\n" + tables(result) + "\n")
    out = arguments.out or (None if dry else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {out}")
    if out == RESULTS and not dry:
        page = ROOT / "docs" / "results.md"
        page.write_text(replace_marked(page.read_text(), "gpu", tables(result)))
    failed = [problem for section in arguments.only for problem in result[section]["problems"]]
    for problem in failed:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
