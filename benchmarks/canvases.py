"""DiffusionGemma's canvases with rows that advance independently, compared with transformers' lock step of all rows.

    python benchmarks/canvases.py [--part schedule|memory|all] [--turns 5]

schedule: eight prompts of different lengths, four canvases each, four seeds, on a small random DiffusionGemma, with and
without end tokens. Three entropy bounds make canvases stable early, at half of their steps, or hardly ever. Measured
are the rows that the decoder evaluates and the calls of decoder and encoder, for several values of `encode_wait`, and
the wall and CPU time of the two libraries in alternating turns. Hooks on the module's encoder and decoder count calls
and rows. "same paths" is what lock step would cost for the canvases of paradec's run.

memory: the peak memory of a request above the loaded model, for one row and for two, each in a separate process.

Prints tables and writes benchmarks/results/canvases.json; each part names the commit it was measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import COMMIT, RESULTS, read_result, write_result
from tables import canvases_memory_table, canvases_table, canvases_wait_table
from timing import forget_peak, resident, time_call

import paradec

RESULT = RESULTS / "canvases.json"
LENGTHS = (5, 7, 9, 12, 15, 18, 21, 24)
CANVASES = 4
SEEDS = (0, 1, 2, 3)
WAITS = (0, 1, 2, 3, 5)
SETTLING = {"early": (3.0, 0.2), "half": (1.0, 0.1), "late": (0.1, 0.005)}
"""(Entropy bound, confidence threshold) by when canvases become stable; "late" has the published checkpoint's."""
VOCABULARY, CANVAS = 262_144, 256
PAD, ENDS = 0, [1, 2, 3]
FIRST_TOKEN = 8
"""Smaller ids are padding, end tokens and image tokens."""


def small_module(vocab: int = 256, canvas: int = 32, hidden: int = 64) -> Any:
    """Build a random `DiffusionGemmaForBlockDiffusion` of two layers, sliding and full, and four experts, float32.

    Logits are products of the last hidden state with the embeddings. Embeddings have std 1, other matrices 0.1: with
    the usual small weights every canvas would run to its last step.
    """
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(
        text_config={
            "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
            "num_global_key_value_heads": 1, "sliding_window": 64, "num_experts": 4, "top_k_experts": 2,
            "layer_types": ["sliding_attention", "full_attention"], "moe_intermediate_size": 16,
            "max_position_embeddings": 4096, "pad_token_id": PAD,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8,
        },
        canvas_length=canvas, image_token_id=5, boi_token_id=6, eoi_token_id=7,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 if "embed_tokens" in name else 0.1, generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
    module.generation_config.pad_token_id = PAD
    return module.eval()


# ---- schedule -------------------------------------------------------------------------------------------------------


class CallCounter:
    """Counter of calls of a module's encoder and decoder, and of their rows, while this context is open."""

    def __init__(self, module: Any):
        model = module.model
        self.parts = {"encoder": (model.encoder, "input_ids"), "decoder": (model.decoder, "decoder_input_ids")}
        self.rows: dict[str, list[int]] = {name: [] for name in self.parts}

    def __enter__(self) -> CallCounter:
        self.handles = []
        for name, (part, ids) in self.parts.items():

            def count_rows(module: Any, args: Any, kwargs: Any, name: str = name, ids: str = ids) -> None:
                self.rows[name].append(len(kwargs[ids]))

            self.handles.append(part.register_forward_pre_hook(count_rows, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def counts(self) -> np.ndarray:
        """Count decoder calls, rows that the decoder evaluated, and encoder calls."""
        return np.array([len(self.rows["decoder"]), sum(self.rows["decoder"]), len(self.rows["encoder"])])


def prompts(module: Any, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 + seed)
    vocab = module.config.text_config.vocab_size
    return [torch.randint(FIRST_TOKEN, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def run_paradec(model: Any, module: Any, settling: str, seed: int, callback: Any = None, **settings: Any) -> Any:
    """Run one request with `paradec.generate`."""
    new = CANVASES * module.config.canvas_length
    settings |= dict(zip(("entropy_bound", "confidence_threshold"), SETTLING[settling], strict=True))
    method = paradec.samplers.create("diffusion_gemma", **settings)
    shared = {"max_new_tokens": new, "seed": seed, "callback": callback}
    return paradec.generate(model, prompts(module, seed), sampler=method, **shared)


def run_transformers(module: Any, settling: str, seed: int, ends: list[int]) -> Any:
    """Run the same request with transformers' `generate`, with prompts padded on the left."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    rows, width = prompts(module, seed), max(LENGTHS)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    bound, confidence = SETTLING[settling]
    torch.manual_seed(seed)
    return module.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=CANVASES * module.config.canvas_length,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=bound),
        confidence_threshold=confidence,
        eos_token_id=ends or None,
        pad_token_id=PAD,
    )


class Paths:
    """A callback that counts the steps of each canvas of each row."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.steps: dict[int, list[int]] = {}

    def __call__(self, state: Any, commit: Any) -> None:
        closes = commit.selected.any(1).tolist()
        for row, closed in zip(commit.rows.tolist(), closes, strict=True):
            self.open[row] = self.open.get(row, 0) + 1
            if closed:
                self.steps.setdefault(row, []).append(self.open.pop(row))

    def lock_step(self, rows: int) -> np.ndarray:
        """Compute decoder calls, rows evaluated and encoder calls if `rows` rows ran these canvases in lock step. A row
        that has ended adds no steps to the later canvases."""
        canvases = max(map(len, self.steps.values()))
        longest = [max(row[index] for row in self.steps.values() if index < len(row)) for index in range(canvases)]
        return np.array([sum(longest), rows * sum(longest), canvases])


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def timed_turns(model: Any, module: Any, settling: str, ends: list[int], turns: int) -> dict[str, Any]:
    """Measure transformers' CPU and wall time over paradec's; in each turn both libraries run every seed."""
    runs: tuple[Callable[[int], Any], ...] = (
        lambda seed: run_paradec(model, module, settling, seed),
        lambda seed: run_transformers(module, settling, seed, ends),
    )
    took = np.zeros((turns, 2, 2))
    for turn in range(turns):
        for seed in SEEDS:
            for which in (0, 1) if turn % 2 else (1, 0):
                took[turn, which] += time_call(partial(runs[which], seed))[1:]
    entry: dict[str, Any] = {}
    for place, clock in enumerate(("cpu", "wall") if turns else ()):
        ratios = spread((took[:, 1, place] / took[:, 0, place]).tolist())
        entry[f"{clock}_ratio"] = {name: round(value, 2) for name, value in ratios.items()}
    return entry


def schedule(turns: int) -> dict[str, Any]:
    """Measure counts and times for each of `SETTLING`, with and without end tokens."""
    module = small_module()
    rows = []
    default = paradec.samplers.create("diffusion_gemma").encode_wait
    for settling in SETTLING:
        for ends in ([], ENDS):
            model = paradec.wrap(module, eos_token_id=ends, pad_token_id=PAD)
            locked, same, steps = np.zeros(3, int), np.zeros(3, int), []
            for seed in SEEDS:
                with CallCounter(module) as counted:
                    run_transformers(module, settling, seed, ends)
                locked += counted.counts()
            by_wait = {}
            for wait in WAITS:
                total = np.zeros(3, int)
                for seed in SEEDS:
                    paths = Paths()
                    with CallCounter(module) as counted:
                        run_paradec(model, module, settling, seed, paths, encode_wait=wait)
                    total += counted.counts()
                    if wait == WAITS[0]:
                        same += paths.lock_step(len(LENGTHS))
                        steps += [count for row in paths.steps.values() for count in row]
                by_wait[wait] = total
            times = timed_turns(model, module, settling, ends, turns)
            model.unwrap()
            entry: dict[str, Any] = {
                "settles": settling,
                "ends": bool(ends),
                "steps_per_canvas": {"mean": round(statistics.mean(steps), 1), "low": min(steps), "high": max(steps)},
                "transformers": _named(locked),
                "encode_wait": [
                    {
                        "wait": wait,
                        **_named(total),
                        "rows_fewer": float(locked[1] / total[1]),
                        "calls_times": float((total[0] + total[2]) / (locked[0] + locked[2])),
                        "rows_fewer_same_paths": float(same[1] / total[1]),
                    }
                    for wait, total in by_wait.items()
                ],
                "default_wait": default,
                **times,
            }
            rows.append(entry)
            print(entry, flush=True)
    settings = {"prompts": LENGTHS, "canvases": CANVASES, "seeds": SEEDS, "settling": SETTLING, "turns": turns}
    return {**settings, "rows": rows}


def _named(counts: np.ndarray) -> dict[str, int]:
    return dict(zip(("decoder_calls", "rows", "encoder_calls"), counts.tolist(), strict=True))


# ---- memory ---------------------------------------------------------------------------------------------------------


class Peaks:
    """Peak memory in bytes of each stage of a request, above the memory in use before it."""

    def __init__(self) -> None:
        self.base = resident("VmRSS")
        self.bytes: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str, outside: str) -> Iterator[None]:
        """Record the peak inside the context under `name`, and the peak since the last record under `outside`."""
        self.record(outside)
        forget_peak()
        yield
        self.record(name)
        forget_peak()

    def record(self, name: str) -> None:
        self.bytes[name] = max(self.bytes.get(name, 0), resident("VmHWM") - self.base)


def peak(who: str, rows: int, vocab: int, canvas: int, hidden: int) -> dict[str, Any]:
    """Measure the peak bytes, above the loaded model, of one canvas in `rows` rows decoded in two steps. Needs a new
    process."""
    torch.set_num_threads(1)
    module = small_module(vocab, canvas, hidden)
    ids = torch.randint(FIRST_TOKEN, vocab, (rows, 8), generator=torch.Generator().manual_seed(0))
    if who == "ours":
        model = paradec.wrap(module)
    forget_peak()
    peaks = Peaks()
    if who == "ours":
        method = paradec.samplers.create("diffusion_gemma", max_denoising_steps=2, early_stop=False)
        state = method.start(model, ids, max_new_tokens=canvas, seed=0)
        with torch.inference_mode():
            while not state.done:
                queries = method.query(state)
                with peaks.stage("model", "else"):
                    outputs = [model(query, state.store) for query in queries]
                with peaks.stage("propose", "else"):
                    proposal = method.propose(state, outputs, queries)
                del outputs
                with peaks.stage("commit", "else"):
                    method.commit(state, proposal)
                del proposal
    else:
        module.forward = peaks.stage("model", "else")(module.forward)
        module.generate(ids, max_new_tokens=canvas, max_denoising_steps=2, stability_threshold=2)
    peaks.record("else")
    return {"who": who, "rows": rows, "peak": max(peaks.bytes.values()), "stages": peaks.bytes}


def peak_alone(who: str, *sizes: int) -> dict[str, Any]:
    """Run `peak` in a new process, since memory freed by this process would hide new allocations."""
    command = [sys.executable, str(Path(__file__).resolve()), "--peak", who, *map(str, sizes)]
    environment = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).resolve().parents[1])}
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(process.stdout.splitlines()[-1])


def memory() -> dict[str, Any]:
    """Measure the peaks of both libraries, and the bytes of one row's logits (canvas x vocabulary float32)."""
    peaks, hidden = [], 64
    for count in (1, 2):
        for who in ("ours", "transformers"):
            peaks.append(peak_alone(who, count, VOCABULARY, CANVAS, hidden))
    sizes = {"vocabulary": VOCABULARY, "canvas": CANVAS, "hidden": hidden}
    return {**sizes, "logits_of_a_row": 4 * VOCABULARY * CANVAS, "peaks": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("schedule", "memory", "all"), default="all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        who, *numbers = arguments.peak
        print(json.dumps(peak(who, *map(int, numbers))))
        return
    import transformers

    report = read_result(RESULT) if RESULT.exists() else {}
    report |= {
        "device": f"cpu ({platform.machine()}), 1 thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {"schedule": lambda: schedule(arguments.turns), "memory": memory}
    for name, measure in parts.items():
        if arguments.part in (name, "all"):
            report[name] = {"commit": COMMIT, **measure()}
            report.pop("commit", None)  # parts may have different commits
            write_result(RESULT, report)
    for to_table in (canvases_table, canvases_wait_table, canvases_memory_table):
        print(to_table(report), end="\n\n")


if __name__ == "__main__":
    main()
