"""Cost of verifying a window of drafts, relative to the model's forward.

    python benchmarks/jacobi.py [--out benchmarks/results/jacobi.json]

One thread, window 16, a vocabulary of 16384 (LlamaGen's), one row. The model is a random Llama of LlamaGen-B's shape
(110M parameters) in float32; its distribution is nearly flat and depends little on the tokens before. This is the hard
case for noise that is drawn once per position: coupled drafts are accepted, and half of a window is new at every step.
Overhead is the time of a step without the model's call.

Times are the process's CPU time (`time.process_time`), on which other work on the machine has little influence. The
settings take steps in turn, and ratios are medians of ratios within a turn. Takes half a minute of CPU time.
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
from transformers import LlamaConfig, LlamaForCausalLM

import paradec

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
    """Build a random Llama of LlamaGen-B's shape."""
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


class Run:
    """Decoding of one row with one setting, step by step."""

    def __init__(self, model: Any, name: str) -> None:
        kind, settings, request = SAMPLERS[name]
        self.model, self.sampler = model, paradec.samplers.create(kind, window=WINDOW, **settings)
        self.state = self.sampler.start(model, [[1, 2, 3, 4]], max_new_tokens=MOST_TOKENS, seed=0, **request)
        self.forward: list[float] = []
        self.rest: list[float] = []

    def step(self) -> None:
        sampler, state = self.sampler, self.state
        times = [time.process_time()]
        queries = sampler.query(state)
        times.append(time.process_time())
        outputs = [self.model(query, state.store) for query in queries]
        times.append(time.process_time())
        sampler.commit(state, sampler.propose(state, outputs, queries))
        self.forward.append(times[2] - times[1])
        self.rest.append(time.process_time() - times[2] + times[1] - times[0])

    def found(self, warm_up: int) -> dict[str, float]:
        """Milliseconds of a step's forward and of the overhead."""
        forward, rest = np.array(self.forward[warm_up:]), np.array(self.rest[warm_up:])
        return {
            "forward_ms": round(1e3 * float(np.median(forward)), 2),
            "overhead_ms": round(1e3 * float(np.median(rest)), 2),
            "ratio": round(float(np.median(rest / forward)), 4),
            "committed": round(float(np.mean(self.state.accepted[warm_up:])), 2),
        }


def overhead(model: Any) -> dict[str, dict[str, float]]:
    """Measure every setting, over steps with a full window."""
    runs = {name: Run(model, name) for name in SAMPLERS}
    warm_up = 2  # the first step evaluates the prompt
    with torch.inference_mode():
        for _ in range(20 + warm_up):
            for run in runs.values():
                run.step()
    return {name: run.found(warm_up) for name, run in runs.items()}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "jacobi.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    module = llama()
    model = paradec.wrap(module, topology="causal", prediction="shifted")
    model.codebook = lambda: module.get_input_embeddings().weight[:, :8]  # LlamaGen's codes have 8 numbers
    result["overhead"] = overhead(model)
    for name, entry in result["overhead"].items():
        print(f"{name}: {entry}", flush=True)
    result["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    result["setup"] = {"window": WINDOW, "vocabulary": VOCAB, "threads": 1, "torch": torch.__version__}
    result["setup"]["machine"] = platform.processor() or platform.machine()
    write_result(options.out, result)


if __name__ == "__main__":
    main()
