"""What verifying a window of drafts costs beside the model's forward, and beside a loop over its slots.

    python benchmarks/jacobi.py [--out benchmarks/results/jacobi.json]

One thread, window 16, a vocabulary of 16384 (LlamaGen's). The model is a random Llama of LlamaGen-B's shape (110M
parameters) in float32. Overhead is everything of a step but the model's call; the loop does for one slot after the
other what
verification does for all: the draws of the refreshed window, the judgement with its wait for the device, the redraw.
Times are medians; each pair is measured alternately, since other work on the machine comes and goes.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.samplers.draft_verify import DraftLaws, draw, judge
from paradec.samplers.sjd import SJD

WINDOW, VOCAB = 16, 16384
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


def overhead(model: Any, name: str, steps: int) -> dict[str, float]:
    """Milliseconds of a step's forward and of all else, over steps of a full window."""
    kind, settings, request = SAMPLERS[name]
    sampler = paradec.samplers.create(kind, window=WINDOW, **settings)
    state = sampler.start(model, [[1, 2, 3, 4]], max_new_tokens=900, seed=0, **request)
    forward, rest = [], []
    with torch.inference_mode():
        for step in range(steps + 2):
            begin = time.perf_counter()
            queries = sampler.query(state)
            asked = time.perf_counter()
            outputs = [model(query, state.store) for query in queries]
            answered = time.perf_counter()
            sampler.commit(state, sampler.propose(state, outputs, queries))
            end = time.perf_counter()
            if step > 1:  # the first evaluates the prompt, the second warms up
                forward.append(answered - asked)
                rest.append(end - answered + asked - begin)
    ratio = [b / a for a, b in zip(forward, rest, strict=True)]
    return {
        "forward_ms": round(1e3 * median(forward), 2),
        "overhead_ms": round(1e3 * median(rest), 2),
        "ratio": round(median(ratio), 4),
    }


def laws(rows: int, seed: int) -> tuple[Tensor, DraftLaws, Tensor]:
    """p, the drafts with dense q near it, and which slots hold one."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, WINDOW, VOCAB, generator=generator)
    p, q = logits.softmax(-1), (logits + 0.5 * torch.randn(rows, WINDOW, VOCAB, generator=generator)).softmax(-1)
    tokens = draw(q, torch.rand(rows, WINDOW, generator=generator, dtype=torch.float64))
    source = torch.arange(WINDOW).expand(rows, -1)
    drafted = (torch.arange(WINDOW) < WINDOW - 1).expand(rows, -1)
    return p, DraftLaws(tokens, q, source, torch.full((VOCAB,), 1 / VOCAB)), drafted


def vectorised(p: Tensor, drafts: DraftLaws, drafted: Tensor) -> list[int]:
    """Verification of all slots and rows; how many tokens each row commits."""
    noise = torch.rand(len(p), WINDOW, 3, dtype=torch.float64)
    fresh = draw(p, noise[..., 0])
    chance = SJD().accept(p, drafts, fresh, None)
    return (judge(p, drafts, drafted, chance, fresh, noise[..., 1:]).standing + 1).flatten().tolist()


def looped(p: Tensor, drafts: DraftLaws, drafted: Tensor) -> list[int]:
    """The same, slot by slot and row by row."""
    counts = []
    for row in range(len(p)):
        tokens, fell = [], False
        for slot in range(WINDOW):
            law, token = p[row, slot], drafts.tokens[row, slot]
            if fell or slot == WINDOW - 1:
                tokens.append(torch.multinomial(law, 1))
                continue
            q = drafts.dense[row, slot]
            if torch.rand(()) < (law[token] / q[token]).clamp(max=1):
                tokens.append(token)
            else:
                tokens.append(torch.multinomial((law - q).clamp(min=0), 1))
                fell = True
                counts.append(slot + 1)
        if not fell:
            counts.append(WINDOW)
    return counts


def verification(rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of both, and their ratio."""
    times: dict[str, list[float]] = {"vectorised": [], "looped": []}
    counts: dict[str, list[int]] = {"vectorised": [], "looped": []}
    for seed in range(repeats + 1):
        given = laws(rows, seed)
        for name, function in (("vectorised", vectorised), ("looped", looped)):
            begin = time.perf_counter()
            counts[name] += function(*given)
            if seed:
                times[name].append(time.perf_counter() - begin)
    fast, slow = (1e3 * median(times[name]) for name in ("vectorised", "looped"))
    ratio = median(b / a for a, b in zip(times["vectorised"], times["looped"], strict=True))
    found = {"vectorised_ms": round(fast, 3), "looped_ms": round(slow, 3), "ratio": round(ratio, 2)}
    return found | {f"mean_committed_{name}": sum(each) / len(each) for name, each in counts.items()}


def main() -> None:
    """Measure and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=12)
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
    for name in SAMPLERS:
        found["overhead"][name] = overhead(model, name, options.steps)
        print(f"{name}: {found['overhead'][name]}", flush=True)
    found["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    found["setup"] = {"window": WINDOW, "vocabulary": VOCAB, "threads": 1, "torch": torch.__version__}
    found["setup"]["machine"] = platform.processor() or platform.machine()
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
