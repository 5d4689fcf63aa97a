"""Canvases of noise row by row, beside transformers' `generate`, which has all rows of a batch go in lock step.

    python benchmarks/canvases.py [--part schedule|memory|all] [--turns 5]

schedule: eight unequal prompts, four canvases each, four seeds, on a small random DiffusionGemma. How many rows the
decoder evaluates, how often decoder and encoder are called, for several `encode_wait`; wall and processor time of both
in alternating turns. Three entropy bounds, which make canvases settle early, at half of their steps, or hardly ever;
with and without end tokens. Calls and rows are counted by hooks on the module's encoder and decoder, for both alike.
"same paths" is what lock step would take on the very canvases that ours took: there the random numbers do not differ.

memory: the peak of a request above the loaded model, for one row and for two, each in a process of its own.

Prints tables and writes benchmarks/results/canvases.json, each part with the commit that it was measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from canvas_model import ENDS, FIRST_TOKEN, PAD, small_module
from provenance import COMMIT, RESULTS, read_result, write_result
from tables import canvases_memory_table, canvases_table, canvases_wait_table

import paradec

RESULT = RESULTS / "canvases.json"
LENGTHS = (5, 7, 9, 12, 15, 18, 21, 24)
CANVASES = 4
SEEDS = (0, 1, 2, 3)
WAITS = (0, 1, 2, 3, 5)
SETTLING = {"early": (3.0, 0.2), "half": (1.0, 0.1), "late": (0.1, 0.005)}
"""Entropy bound and confidence threshold; the last are the checkpoint's own."""
VOCABULARY, CANVAS = 262_144, 256


# ---- schedule -------------------------------------------------------------------------------------------------------


class Counted:
    """Calls of a module's encoder and decoder while it is entered: the rows of each."""

    def __init__(self, module: Any):
        both = module.model
        self.parts = {"encoder": (both.encoder, "input_ids"), "decoder": (both.decoder, "decoder_input_ids")}
        self.rows: dict[str, list[int]] = {name: [] for name in self.parts}

    def __enter__(self) -> Counted:
        self.handles = []
        for name, (part, ids) in self.parts.items():

            def note(module: Any, args: Any, kwargs: Any, name: str = name, ids: str = ids) -> None:
                self.rows[name].append(len(kwargs[ids]))

            self.handles.append(part.register_forward_pre_hook(note, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def counts(self) -> np.ndarray:
        """Decoder calls, rows that the decoder evaluated, encoder calls."""
        return np.array([len(self.rows["decoder"]), sum(self.rows["decoder"]), len(self.rows["encoder"])])


def prompts(module: Any, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 + seed)
    vocab = module.config.text_config.vocab_size
    return [torch.randint(FIRST_TOKEN, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def sampler(settling: str, **settings: Any) -> Any:
    bound, confidence = SETTLING[settling]
    return paradec.samplers.create("diffusion_gemma", entropy_bound=bound, confidence_threshold=confidence, **settings)


def ours(model: Any, module: Any, settling: str, seed: int, callback: Any = None, **settings: Any) -> Any:
    """One request of `paradec.generate`."""
    new = CANVASES * module.config.canvas_length
    method = sampler(settling, **settings)
    return paradec.generate(
        model, prompts(module, seed), max_new_tokens=new, sampler=method, seed=seed, callback=callback
    )


def theirs(module: Any, settling: str, seed: int, ends: list[int]) -> Any:
    """The same request of transformers' `generate`, prompts padded on the left."""
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
    """A callback: how many steps each canvas of each row took."""

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
        """Decoder calls, rows evaluated and encoder calls of these canvases in lock step; of rows that have ended the
        steps are not known, and count as none."""
        canvases = max(map(len, self.steps.values()))
        longest = [max(row[index] for row in self.steps.values() if index < len(row)) for index in range(canvases)]
        return np.array([sum(longest), rows * sum(longest), canvases])


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def timed_turns(
    model: Any, module: Any, settling: str, ends: list[int], seeds: tuple[int, ...], turns: int
) -> dict[str, Any]:
    """Wall and processor time of transformers over ours, over turns that each answer every seed."""
    runs: tuple[Callable[[int], Any], ...] = (
        lambda seed: ours(model, module, settling, seed),
        lambda seed: theirs(module, settling, seed, ends),
    )
    took = np.zeros((turns, 2, 2))
    for turn in range(turns):
        for seed in seeds:
            for which in (0, 1) if turn % 2 else (1, 0):
                took[turn, which] += timed(partial(runs[which], seed))
    found: dict[str, Any] = {}
    for place, clock in enumerate(("wall", "cpu") if turns else ()):
        ratios = spread((took[:, 1, place] / took[:, 0, place]).tolist())
        found[f"{clock}_ratio"] = {name: round(value, 2) for name, value in ratios.items()}
    return found


def schedule(
    module: Any,
    turns: int,
    seeds: tuple[int, ...] = SEEDS,
    waits: tuple[int, ...] = WAITS,
    settlings: tuple[str, ...] = tuple(SETTLING),
) -> list[dict[str, Any]]:
    """The counts and times of every setting."""
    found = []
    default = paradec.samplers.create("diffusion_gemma").encode_wait
    for settling in settlings:
        for ends in ([], ENDS):
            model = paradec.wrap(module, eos_token_id=ends, pad_token_id=PAD)
            locked, same, steps = np.zeros(3, int), np.zeros(3, int), []
            for seed in seeds:
                with Counted(module) as counted:
                    theirs(module, settling, seed, ends)
                locked += counted.counts()
            by_wait = {}
            for wait in waits:
                total = np.zeros(3, int)
                for seed in seeds:
                    paths = Paths()
                    with Counted(module) as counted:
                        ours(model, module, settling, seed, paths, encode_wait=wait)
                    total += counted.counts()
                    if wait == waits[0]:
                        same += paths.lock_step(len(LENGTHS))
                        steps += [count for row in paths.steps.values() for count in row]
                by_wait[wait] = total
            times = timed_turns(model, module, settling, ends, seeds, turns)
            model.unwrap()
            entry: dict[str, Any] = {
                "settles": settling,
                "ends": bool(ends),
                "steps_per_canvas": {"mean": round(statistics.mean(steps), 1), "low": min(steps), "high": max(steps)},
                "transformers": _named(locked),
                "encode_wait": [{"wait": wait, **_compared(total, locked, same)} for wait, total in by_wait.items()],
                "default_wait": default,
                **times,
            }
            found.append(entry)
            print(entry, flush=True)
    return found


def schedules(turns: int) -> dict[str, Any]:
    settings = {"prompts": LENGTHS, "canvases": CANVASES, "seeds": SEEDS, "settling": SETTLING, "turns": turns}
    return {**settings, "rows": schedule(small_module(), turns)}


def _named(counts: np.ndarray) -> dict[str, int]:
    return dict(zip(("decoder_calls", "rows", "encoder_calls"), counts.tolist(), strict=True))


def _compared(total: np.ndarray, locked: np.ndarray, same: np.ndarray) -> dict[str, Any]:
    """How many times fewer rows, and how many times as many calls of both kinds."""
    return {
        **_named(total),
        "rows_fewer": float(locked[1] / total[1]),
        "calls_times": float((total[0] + total[2]) / (locked[0] + locked[2])),
        "rows_fewer_same_paths": float(same[1] / total[1]),
    }


# ---- memory ---------------------------------------------------------------------------------------------------------


def resident(name: str) -> int:
    """Bytes: "VmRSS" now, or "VmHWM", the most since `begin_peak`."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Peaks:
    """The most memory of each stage, above what stood before the request."""

    def __init__(self) -> None:
        self.base = resident("VmRSS")
        self.most: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str, outside: str) -> Iterator[None]:
        """Inside it is `name`, until then it was `outside`."""
        self.note(outside)
        begin_peak()
        yield
        self.note(name)
        begin_peak()

    def note(self, name: str) -> None:
        self.most[name] = max(self.most.get(name, 0), resident("VmHWM") - self.base)


def peak(who: str, rows: int, vocab: int, canvas: int, hidden: int, steps: int = 2) -> dict[str, Any]:
    """Bytes above the loaded model of one canvas of `rows` rows, that takes so many steps. In a process of its own."""
    torch.set_num_threads(1)
    module = small_module(vocab, canvas, hidden)
    ids = torch.randint(FIRST_TOKEN, vocab, (rows, 8), generator=torch.Generator().manual_seed(0))
    if who == "ours":
        model = paradec.wrap(module)
    begin_peak()
    peaks = Peaks()
    if who == "ours":
        method = paradec.samplers.create("diffusion_gemma", max_denoising_steps=steps, early_stop=False)
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
        forward = module.forward

        def staged(*args: Any, **kwargs: Any) -> Any:
            with peaks.stage("model", "else"):
                return forward(*args, **kwargs)

        module.forward = staged
        module.generate(ids, max_new_tokens=canvas, max_denoising_steps=steps, stability_threshold=steps)
    peaks.note("else")
    return {"who": who, "rows": rows, "peak": max(peaks.most.values()), "stages": peaks.most}


def peak_alone(who: str, *sizes: int) -> dict[str, Any]:
    """`peak` in a process of its own: memory that this one has freed would hide what is asked for anew."""
    command = [sys.executable, str(Path(__file__).resolve()), "--peak", who, *map(str, sizes)]
    environment = os.environ | {"PYTHONPATH": str(Path(paradec.__file__).resolve().parents[1])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory(vocab: int = VOCABULARY, canvas: int = CANVAS, hidden: int = 64, rows: tuple[int, ...] = (1, 2)) -> Any:
    """The peaks of both, in logits of one row (canvas x vocabulary float32)."""
    unit = 4 * vocab * canvas
    found = []
    for count in rows:
        for who in ("ours", "transformers"):
            found.append(peak_alone(who, count, vocab, canvas, hidden))
    return {"vocabulary": vocab, "canvas": canvas, "hidden": hidden, "logits_of_a_row": unit, "peaks": found}


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
    parts: dict[str, Callable[[], dict[str, Any]]] = {"schedule": lambda: schedules(arguments.turns), "memory": memory}
    for name, measure in parts.items():
        if arguments.part in (name, "all"):
            report[name] = {"commit": COMMIT, **measure()}
            report.pop("commit", None)  # parts may be of several
            write_result(RESULT, report)
    for to_table in (canvases_table, canvases_wait_table, canvases_memory_table):
        print(to_table(report), end="\n\n")


if __name__ == "__main__":
    main()
