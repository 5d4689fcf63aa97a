"""How much time a step spends outside the model's forward, and how it compares with a loop written by hand.

    python benchmarks/overhead.py [--model FOLDER ...] [--repeats 21]

One thread, one run. For every model, sampler and batch size the same prompts are decoded
- by `paradec`, with the time inside the model's call measured apart, and
- by a plain loop: forward, float64 softmax, commit, until nothing is masked,
in turns, so that both see the same machine; repeats go round all cases, so that a slow minute falls on all of them.
Prints medians and writes benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from pathlib import Path

import torch
from provenance import write_result

import paradec
from paradec.core.protocol import decode
from paradec.models.adapter import Model

ROOT = Path(__file__).resolve().parent.parent
NEW = 32


def plain_threshold(model: Model, ids: torch.Tensor, threshold: float, block: int) -> tuple[torch.Tensor, int]:
    """The threshold rule of Fast-dLLM as one writes it for one model: no protocol, no options, equal prompts."""
    mask = model.facts.mask_token_id
    x = torch.cat((ids, torch.full((len(ids), NEW), mask)), 1)
    forwards = 0
    for start in range(ids.shape[1], x.shape[1], block):
        while True:
            masked = x == mask
            masked[:, start + block :] = False
            if not masked.any():
                break
            logits = model.module(input_ids=x, use_cache=False).logits
            if model.facts.shift:
                logits = torch.cat((logits[:, :1], logits[:, :-1]), 1)
            confidence, token = logits.double().softmax(-1).max(-1)
            confidence = torch.where(masked, confidence, -torch.inf)
            take = confidence >= threshold
            best = confidence.argmax(1, keepdim=True)
            take.scatter_(1, best, masked.any(1, keepdim=True))
            x = torch.where(take & masked, token, x)
            forwards += 1
    return x, forwards


def plain_low_confidence(model: Model, ids: torch.Tensor, block: int) -> tuple[torch.Tensor, int]:
    """LLaDA's low-confidence rule, one token a step, as one writes it for one model."""
    mask = model.facts.mask_token_id
    x = torch.cat((ids, torch.full((len(ids), NEW), mask)), 1)
    forwards = 0
    for start in range(ids.shape[1], x.shape[1], block):
        for _ in range(block):
            masked = x == mask
            logits = model.module(input_ids=x, use_cache=False).logits
            if model.facts.shift:
                logits = torch.cat((logits[:, :1], logits[:, :-1]), 1)
            token = logits.argmax(-1)
            confidence = logits.double().softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
            confidence[:, start + block :] = -torch.inf
            confidence = torch.where(masked, confidence, -torch.inf)
            take = torch.zeros_like(masked)
            for row in range(len(x)):
                take[row, confidence[row].topk(1).indices] = True
            x = torch.where(take, token, x)
            forwards += 1
    return x, forwards


class Timed:
    """A model whose calls are timed."""

    def __init__(self, model: Model):
        self.model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, query: object) -> torch.Tensor:
        begin = time.perf_counter()
        logits = self.model(query)
        self.seconds += time.perf_counter() - begin
        return logits


def measure(model: Model, name: str, ids: torch.Tensor, block: int) -> tuple[float, float, float]:
    """One decode by paradec and one by the plain loop: time outside over time inside the model's call, a step of ours
    over a step of the plain loop, and milliseconds of a step of ours."""
    sampler = paradec.samplers.create(name)
    timed = Timed(model)
    state = sampler.start(timed, ids, max_new_tokens=NEW, block_length=block, eos_early_stop=False)
    begin = time.perf_counter()
    decode(sampler, timed, state)
    ours = time.perf_counter() - begin
    with torch.inference_mode():
        begin = time.perf_counter()
        if name == "threshold":
            x, forwards = plain_threshold(model, ids, 0.9, block)
        else:
            x, forwards = plain_low_confidence(model, ids, block)
        plain = time.perf_counter() - begin
    assert torch.equal(x, state.canvas), "the two loops decode different tokens"
    steps = int(state.nfe.max())
    return (ours - timed.seconds) / timed.seconds, (ours / steps) / (plain / forwards), 1e3 * ours / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    golden = ROOT / "tests" / "golden"
    parser.add_argument("--model", nargs="*", default=[golden / "llada-tiny", golden / "dream-tiny"], type=Path)
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {folder.name: paradec.load(folder) for folder in arguments.model}
    prompts = {n: torch.randint(0, 30, (n, 9), generator=torch.Generator().manual_seed(0)) for n in (1, 8)}
    cases = list(itertools.product(models, ("threshold", "low_confidence"), (32, 8), prompts))
    found: dict[tuple[str, str, int, int], list[tuple[float, float, float]]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats + 1):
        for folder, name, block, batch in cases:
            ratios = measure(models[folder], name, prompts[batch], block)
            if repeat:  # the first is a warm-up
                found[folder, name, block, batch].append(ratios)
    rows = []
    print(
        f"{'model':12} {'sampler':16} {'block':>5} {'batch':>5} {'outside/forward':>16} {'paradec/plain':>14} "
        f"{'ms/step':>8}"
    )
    for (folder, name, block, batch), ratios in found.items():
        outside, versus, milliseconds = map(statistics.median, zip(*ratios, strict=True))
        print(f"{folder:12} {name:16} {block:5d} {batch:5d} {outside:15.1%} {versus:13.2f}x {milliseconds:8.2f}")
        rows.append(
            {"model": folder, "sampler": name, "block": block, "batch": batch}
            | {"outside_forward": outside, "versus_plain_loop": versus, "ms_per_step": milliseconds}
        )
    result = {"device": f"cpu ({platform.machine()}), 1 thread", "torch": torch.__version__, "rows": rows}
    path = ROOT / "benchmarks" / "results" / "overhead.json"
    path.parent.mkdir(exist_ok=True)
    write_result(path, result)
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
