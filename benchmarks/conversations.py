"""`paradec serve` with conversations that share a system prompt, with and without its prefix cache.

    python benchmarks/conversations.py                        # about 10 minutes on two cores
    python benchmarks/conversations.py --conversations 8 --turns 1 --out runs/conversations.json

Two models with random weights (4 layers, 128 wide, float64, so that answers can be compared): a causal one decoded by
`sjd(window=4)`, and one in SDAR's format with blocks of 4 by `threshold` and cache="block". All conversations run at
the same time. Each has 8 turns after one system prompt of 400 tokens; a turn has 20 tokens of the user and at most 24
of an answer, which the next turn repeats. The prefix cache of 512 MB has room for all. Measured: positions evaluated,
the server's CPU time, seconds of a turn.

Then prompts without common prefixes: CPU time with and without the prefix cache, with 128 prompts per turn to each of
two servers alternately (`--turns`), with these models and with wider ones (8 layers, 512 wide).

Exits with 1 if an answer differs or is lost, or the ratio of evaluated positions is above 0.4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI
from provenance import write_result
from server import KEY, Server
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import paradec
from paradec.core.packaged import WORDS

RESULT = Path(__file__).parent / "results" / "conversations.json"
TURNS, SYSTEM, USER, ANSWER = 8, 400, 20, 24
BUDGET = 512 * 10**6
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
SERVED = {
    "causal": ["--sampler", "sjd", "--set", "window=4"],
    "block_causal": ["--sampler", "threshold", "--cache", "block"],
}


def make(kind: str, folder: Path, sizes: dict[str, int] = SIZES) -> Path:
    """Write a checkpoint with random weights and the packaged tokenizer."""
    tokenizer = paradec.load().tokenizer
    torch.manual_seed(0)
    ids: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    more: dict[str, Any] = {**sizes, **ids, "max_position_embeddings": 2048}
    if kind == "causal":
        LlamaForCausalLM(LlamaConfig(**more)).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**more, num_key_value_heads=2, head_dim=32)).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, "rope_theta": 10000.0}
        config |= {"mask_token_id": tokenizer.mask_token_id}
        (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder


def draw_text(seed: Any, count: int) -> str:
    """Draw a text of `count` tokens that depends on the seed."""
    draw = random.Random(str(seed))
    return " ".join(draw.choice(WORDS) for _ in range(count))


class Load:
    """Clients of one server."""

    def __init__(self, server: Server):
        self.server = server
        self.seconds: list[float] = []

    def cpu(self) -> float:
        """Seconds of the server's CPU time so far."""
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def ask(self, client: AsyncOpenAI, messages: list[Any], tokens: int = ANSWER) -> str:
        began = time.perf_counter()
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=tokens)
        self.seconds.append(time.perf_counter() - began)
        return answer.choices[0].message.content

    def run(self, work: Any) -> dict[str, Any]:
        """Run `work(client)`; return its answers and costs."""

        async def with_client() -> Any:
            address = f"http://127.0.0.1:{self.server.port}/v1"
            async with AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=3600) as client:
                return await work(client)

        self.seconds, before, counts = [], self.cpu(), self.server.metrics()
        answers = asyncio.run(with_client())
        after = self.server.metrics()
        return {
            "answers": answers,
            "positions": int(after["paradec_positions_total"] - counts["paradec_positions_total"]),
            "reused": int(after["paradec_prefix_tokens"] - counts["paradec_prefix_tokens"]),
            "cpu_seconds": round(self.cpu() - before, 2),
            "p50_seconds": round(float(np.percentile(self.seconds, 50)), 3),
            "p99_seconds": round(float(np.percentile(self.seconds, 99)), 3),
        }

    def conversations(self, count: int) -> dict[str, Any]:
        """Run all conversations at the same time; each turn follows the answer of the turn before."""

        async def one(client: AsyncOpenAI, number: int) -> list[str]:
            messages = [{"role": "system", "content": draw_text("system", SYSTEM)}]
            for turn in range(TURNS):
                messages.append({"role": "user", "content": draw_text((number, turn), USER)})
                messages.append({"role": "assistant", "content": await self.ask(client, messages)})
            return [message["content"] for message in messages[2::2]]

        async def work(client: AsyncOpenAI) -> Any:
            return await asyncio.gather(*(one(client, number) for number in range(count)))

        return self.run(work)

    def strangers(self, numbers: range) -> dict[str, Any]:
        """Send prompts without common prefixes, 32 at a time."""

        async def work(client: AsyncOpenAI) -> Any:
            limit = asyncio.Semaphore(32)

            async def one(number: int) -> str:
                async with limit:
                    return await self.ask(client, [{"role": "user", "content": draw_text(number, 60)}], 8)

            return await asyncio.gather(*map(one, numbers))

        return self.run(work)


def started(folder: Path, kind: str, options: list[str]) -> Load:
    """Start a server, and let it answer two prompts."""
    load = Load(Server(32, ["--model", str(folder), "--name", "m", "--dtype", "float64", *SERVED[kind], *options]))
    load.strangers(range(-200, -198))
    return load


def measured(folder: Path, kind: str, options: list[str], work: Any) -> dict[str, Any]:
    """Start a server, return the result of `work(load)`, and stop the server."""
    load = started(folder, kind, options)
    try:
        return work(load)
    finally:
        load.server.stop()


def measure_costs(folder: Path, kind: str, turns: int) -> dict[str, Any]:
    """Measure the ratio of CPU times of servers with and without prefix cache, in turns, for prompts without common
    prefixes."""
    keeps: dict[str, list[str]] = {"kept": [], "none": ["--prefix-memory", "0"]}
    servers, ratios = {name: started(folder, kind, options) for name, options in keeps.items()}, []
    try:
        for turn in range(-1, turns):  # the first turn is not counted
            prompts = range(128 * turn, 128 * (turn + 1))
            took = {name: load.strangers(prompts)["cpu_seconds"] for name, load in servers.items()}
            ratios += [took["kept"] / took["none"]] if turn >= 0 else []
    finally:
        for load in servers.values():
            load.server.stop()
    return {
        "median": round(statistics.median(ratios), 3),
        "quartiles": np.quantile(ratios, (0.25, 0.75)).round(3).tolist(),
    }


def measure_kind(kind: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make both measurements on one model."""
    keeps = {"kept": ["--prefix-memory", str(BUDGET)], "none": ["--prefix-memory", "0"]}
    talks = {
        name: measured(folder, kind, options, lambda load: load.conversations(args.conversations))
        for name, options in keeps.items()
    }
    answers = [talks[name].pop("answers") for name in keeps]
    differ = sum(a != b for one, other in zip(*answers, strict=True) for a, b in zip(one, other, strict=True))
    costs = {"narrow": measure_costs(folder, kind, args.turns)}
    with tempfile.TemporaryDirectory() as other:
        costs["wide"] = measure_costs(make(kind, Path(other), WIDE), kind, args.turns)

    return {
        "conversations": talks,
        "answers_differ": differ,
        "positions_ratio": round(talks["kept"]["positions"] / talks["none"]["positions"], 3),
        "cpu_ratio": round(talks["kept"]["cpu_seconds"] / talks["none"]["cpu_seconds"], 3),
        "cpu_ratio_without_reuse": costs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    result: dict[str, Any] = {"turns": TURNS, "system": SYSTEM, "user": USER, "answer": ANSWER}
    for kind in SERVED:
        with tempfile.TemporaryDirectory() as folder:
            result[kind] = measure_kind(kind, make(kind, Path(folder)), args) | {"load": round(os.getloadavg()[0], 1)}
        print(kind, json.dumps(result[kind], indent=1), flush=True)
    write_result(args.out, result)
    sys.exit(any(result[kind]["answers_differ"] or result[kind]["positions_ratio"] > 0.4 for kind in SERVED))


if __name__ == "__main__":
    main()
