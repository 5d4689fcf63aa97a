"""Cost of recording and of replaying a rollout, relative to decoding: positions evaluated, and CPU time.

    python benchmarks/rollouts.py [--turns 7] [--models causal --out benchmarks/results/rollouts_causal.json]

A bidirectional, a block-causal and a causal Llama with random weights (4 layers, 256 wide, a vocabulary of 4,096)
decode 4 prompts of 32 tokens, 64 new tokens each, at temperature 1: with one token per step, and with four (the causal
model with SJD's window of 4 slots). The rollout is then replayed in several ways, with and without gradients. Times are
CPU times on one thread, measured in turns: medians with quartiles. Prints a table and writes
benchmarks/results/rollouts.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from transformers import LlamaConfig, LlamaForCausalLM

import paradec

VOCAB, MASK, ROWS, PROMPT, NEW, BLOCK = 4096, 4095, 4, 32, 64, 8
MASKED = {"one token": {"sampler": "low_confidence"}, "four tokens": {"sampler": "low_confidence", "steps": NEW // 4}}
CAUSAL = {"one token": {"sampler": "sjd(window=1)"}, "window of 4": {"sampler": "sjd(window=4)"}}
MODELS = {"bidirectional": MASKED, "block_causal": MASKED, "causal": CAUSAL}


def model_of(topology: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, num_key_value_heads=2))
    if topology == "causal":
        return paradec.wrap(module, topology=topology, prediction="shifted")
    block = BLOCK if topology == "block_causal" else None
    return paradec.wrap(module, mask_token_id=MASK, topology=topology, prediction="same", block_length=block)


def positions_of(model: Any, run: Callable[[], Any]) -> int:
    """Run `run()` and count the positions that the model's module evaluates, including padding."""
    counts = []
    handle = model.module.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    run()
    handle.remove()
    return sum(counts)


def measure(topology: str, setting: dict[str, Any], turns: int) -> dict[str, Any]:
    """Measure each kind of run: {"error": largest difference of a replay's log-probabilities, name: costs}."""
    model = model_of(topology)
    prompts = torch.randint(0, MASK, (ROWS, PROMPT))
    request = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 0, **setting}
    request |= {"bidirectional": {"block_length": BLOCK}, "block_causal": {"cache": "block"}}.get(topology, {})
    rollout = paradec.generate(model, prompts, rollout=True, **request).rollout

    def replay(gradients: bool, **more: Any) -> Callable[[], None]:
        def run() -> None:
            with torch.set_grad_enabled(gradients):
                log_probs = paradec.replay(model, rollout, **more)
            if gradients:
                log_probs.nansum().backward()
                model.module.zero_grad()

        return run

    runs: dict[str, Callable[[], Any]] = {
        "decode": lambda: paradec.generate(model, prompts, **request),
        "decode, recorded": lambda: paradec.generate(model, prompts, rollout=True, **request),
        "replay": replay(False),
        "replay, gradients": replay(True),
    }
    if topology != "causal":
        runs["replay, shrink=4"] = replay(False, shrink=4)
    if topology == "block_causal":
        runs["replay, state by state"] = replay(False, one_forward=False)
    with torch.no_grad():
        error = (paradec.replay(model, rollout) - rollout.logp).abs().nan_to_num().max().item()
    evaluated = {name: positions_of(model, run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin)
    entry: dict[str, Any] = {"error": error}
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(times, seconds["decode"], strict=True))
        entry[name] = {"positions": evaluated[name], "seconds": [low, middle, high], "of decode": ratio}
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollouts.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"turns": args.turns, "load": os.getloadavg()[0]}
    print("| model | steps | | positions | CPU seconds | of the decoding |\n|---|---|---|---|---|---|")
    for topology in args.models:
        for steps, setting in MODELS[topology].items():
            entry = result[f"{topology}, {steps}"] = measure(topology, setting, args.turns)
            for name, cost in entry.items():
                if name != "error":
                    low, middle, high = cost["seconds"]
                    cells = f"{cost['positions']:,} | {middle:.2f} ({low:.2f} to {high:.2f}) | {cost['of decode']:.2f}"
                    print(f"| {topology} | {steps} | {name} | {cells} |", flush=True)
    write_result(args.out, result)


if __name__ == "__main__":
    main()
