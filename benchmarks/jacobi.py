"""What verifying a window of drafts costs beside the model's forward, and beside a loop over its slots.

    python benchmarks/jacobi.py [--out benchmarks/results/jacobi.json]

One thread, window 16, a vocabulary of 16384 (LlamaGen's), one row. The model is a random Llama of LlamaGen-B's shape
(110M parameters) in float32; its distribution is nearly flat and moves little with what comes before. That is the hard
case for noise that is drawn once per position: coupled drafts are accepted, and half of a window is new at every step.
Overhead is everything of a step but the model's call; the loop does for one slot after the other what verification does
for all: the draws of the refreshed window, the acceptance with its wait for the device, the resampling.

Times are the process's own (`time.process_time`), which other work on the machine touches little; `wall_ratio` is by
the clock on the wall. Everything is measured in turns, one step or call of each, and ratios are medians of ratios
within a turn. About half a minute of processor time.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import write_result
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.verification import DraftDistributions, DraftWindow, verify

WINDOW, VOCAB = 16, 16384
MOST_TOKENS = 400
SAMPLERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sjd": ("sjd", {}, {}),
    "sjd, greedy": ("sjd", {}, {"temperature": 0}),
    "sjd, top-k 1000": ("sjd", {}, {"top_k": 1000}),
    "sjd, top-k 1000, top-p 0.9": ("sjd", {}, {"top_k": 1000, "top_p": 0.9}),
    "scd, gumbel": ("scd", {}, {}),
    "scd, maximal": ("scd", {"refresh": "maximal"}, {}),
    "gsd": ("gsd", {}, {}),
    "lantern++": ("lantern++", {}, {}),
}


def llama() -> LlamaForCausalLM:
    """A random Llama of LlamaGen-B's shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


class Stopwatch:
    """Seconds since the last look, the process's own and those on the wall."""

    def __init__(self) -> None:
        self.last = self._now()

    @staticmethod
    def _now() -> np.ndarray:
        return np.array((time.process_time(), time.perf_counter()))

    def look(self) -> np.ndarray:
        before, self.last = self.last, self._now()
        return self.last - before


class Run:
    """A decoding of one row under one setting, step by step."""

    def __init__(self, model: Any, name: str) -> None:
        kind, settings, request = SAMPLERS[name]
        self.model, self.sampler = model, paradec.samplers.create(kind, window=WINDOW, **settings)
        self.state = self.sampler.start(model, [[1, 2, 3, 4]], max_new_tokens=MOST_TOKENS, seed=0, **request)
        self.forward: list[np.ndarray] = []
        self.rest: list[np.ndarray] = []

    def step(self) -> None:
        sampler, state = self.sampler, self.state
        watch = Stopwatch()
        queries = sampler.query(state)
        rest = watch.look()
        outputs = [self.model(query, state.store) for query in queries]
        self.forward.append(watch.look())
        sampler.commit(state, sampler.propose(state, outputs, queries))
        self.rest.append(rest + watch.look())

    def found(self, warm_up: int) -> dict[str, float]:
        """Milliseconds of a step's forward and of all else."""
        forward, rest = np.array(self.forward[warm_up:]), np.array(self.rest[warm_up:])
        ratio, wall_ratio = np.median(rest / forward, 0)
        return {
            "forward_ms": round(1e3 * float(np.median(forward[:, 0])), 2),
            "overhead_ms": round(1e3 * float(np.median(rest[:, 0])), 2),
            "ratio": round(float(ratio), 4),
            "wall_ratio": round(float(wall_ratio), 4),
            "committed": round(float(np.mean(self.state.accepted[warm_up:])), 2),
        }


def overhead(model: Any, steps: int) -> dict[str, dict[str, float]]:
    """Every setting, over steps of a full window."""
    runs = {name: Run(model, name) for name in SAMPLERS}
    warm_up = 2  # the first step evaluates the prompt
    with torch.inference_mode():
        for _ in range(min(steps, MOST_TOKENS // WINDOW - 1 - warm_up) + warm_up):
            for run in runs.values():
                run.step()
    return {name: run.found(warm_up) for name, run in runs.items()}


def distributions(rows: int, seed: int) -> tuple[Tensor, DraftDistributions, Tensor]:
    """p, the drafts with dense q near it, and which slots hold one."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, WINDOW, VOCAB, generator=generator)
    p, q = logits.softmax(-1), (logits + 0.5 * torch.randn(rows, WINDOW, VOCAB, generator=generator)).softmax(-1)
    tokens = draw(q, torch.rand(rows, WINDOW, generator=generator, dtype=torch.float64))
    source = torch.arange(WINDOW).expand(rows, -1)
    drafted = (torch.arange(WINDOW) < WINDOW - 1).expand(rows, -1)
    return p, DraftDistributions(tokens, q, source, torch.full((VOCAB,), 1 / VOCAB)), drafted


def vectorised(p: Tensor, drafts: DraftDistributions, drafted: Tensor) -> list[int]:
    """Verification of all slots and rows; how many tokens each row commits."""
    noise = torch.rand(len(p), WINDOW, 3, dtype=torch.float64)
    fresh = draw(p, noise[..., 0])
    window = DraftWindow(p, drafts, fresh)
    return (verify(window, drafted, SJD().accept(window), noise[..., 1:]).accepted + 1).flatten().tolist()


def looped(p: Tensor, drafts: DraftDistributions, drafted: Tensor) -> list[int]:
    """The same, slot by slot and row by row."""
    counts = []
    for row in range(len(p)):
        tokens, rejected = [], False
        for slot in range(WINDOW):
            target, token = p[row, slot], drafts.tokens[row, slot]
            if rejected or slot == WINDOW - 1:
                tokens.append(torch.multinomial(target, 1))
                continue
            q = drafts.dense[row, slot]
            if torch.rand(()) < (target[token] / q[token]).clamp(max=1):
                tokens.append(token)
            else:
                tokens.append(torch.multinomial((target - q).clamp(min=0), 1))
                rejected = True
                counts.append(slot + 1)
        if not rejected:
            counts.append(WINDOW)
    return counts


def verification(rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of both, and their ratio. Each goes first in turn, and finds the distributions in the caches: in a
    step the softmax has just written them."""
    functions = {"vectorised": vectorised, "looped": looped}
    times: dict[str, list[np.ndarray]] = {"vectorised": [], "looped": []}
    counts: dict[str, list[int]] = {"vectorised": [], "looped": []}
    for seed in range(repeats + 1):
        given = distributions(rows, seed)
        for name in sorted(functions, reverse=bool(seed % 2)):
            given[0].sum()
            watch = Stopwatch()
            counts[name] += functions[name](*given)
            if seed:
                times[name].append(watch.look())
    fast, slow = (np.array(times[name]) for name in ("vectorised", "looped"))
    ratio, wall_ratio = np.median(slow / fast, 0)
    found = {f"{name}_ms": round(1e3 * float(np.median(each, 0)[0]), 3) for name, each in times.items()}
    found |= {"ratio": round(float(ratio), 2), "wall_ratio": round(float(wall_ratio), 2)}
    return found | {f"mean_committed_{name}": sum(each) / len(each) for name, each in counts.items()}


def main() -> None:
    """Measure and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "jacobi.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"verification": {}, "overhead": {}}
    for rows in (1, 4, 16):
        found["verification"][f"rows {rows}"] = verification(rows, options.repeats)
        print(f"verification, {rows} rows: {found['verification'][f'rows {rows}']}", flush=True)
    module = llama()
    model = paradec.wrap(module, topology="causal", prediction="shifted")
    model.codebook = lambda: module.get_input_embeddings().weight[:, :8]  # LlamaGen's codes have 8 numbers
    found["overhead"] = overhead(model, options.steps)
    for name, entry in found["overhead"].items():
        print(f"{name}: {entry}", flush=True)
    found["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    found["setup"] = {"window": WINDOW, "vocabulary": VOCAB, "threads": 1, "torch": torch.__version__}
    found["setup"]["machine"] = platform.processor() or platform.machine()
    write_result(options.out, found)


if __name__ == "__main__":
    main()
