"""`paradec serve` with conversations that share a system prompt, with and without its prefix cache.

    python benchmarks/conversations.py                        # about 10 minutes on two cores
    python benchmarks/conversations.py --conversations 8 --turns 1 --out runs/conversations.json

Two models with random weights (4 layers, 128 wide, float64, so that answers can be compared): a causal model decoded by
`sjd(window=4)`, and a model in SDAR's format with blocks of 4, decoded by `threshold` with cache="block".

Conversations: all run at the same time. Each has 8 turns after one system prompt of 400 tokens. In a turn the user
sends 20 tokens, and the answer has at most 24; later turns repeat both. The prefix cache of 512 MB has room for all.
Measured: positions evaluated, the server's CPU time, seconds per turn.

Prompts without common prefixes: CPU time with and without the prefix cache, for these models and for wider ones (8
layers, 512 wide). In each of `--turns` rounds, two servers get the same 128 prompts, one after the other.

Exits with 1 if an answer differs or is lost, or if more than 0.4 of the positions are evaluated with the prefix cache.
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


def write_checkpoint(kind: str, folder: Path, sizes: dict[str, int] = SIZES) -> Path:
    """Write a checkpoint with random weights and the packaged tokenizer; return its folder."""
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
    """Load on one server, from asynchronous clients; measures its costs."""

    def __init__(self, server: Server):
        self.server = server
        self.seconds: list[float] = []

    def cpu(self) -> float:
        """Read the CPU seconds that the server has used so far."""
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def ask(self, client: AsyncOpenAI, messages: list[Any], tokens: int = ANSWER) -> str:
        began = time.perf_counter()
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=tokens)
        self.seconds.append(time.perf_counter() - began)
        return answer.choices[0].message.content

    def run(self, work: Any) -> dict[str, Any]:
        """Await `work(client)`; return its answers and what they cost the server."""

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
        """Run `count` conversations at the same time."""

        async def converse(client: AsyncOpenAI, number: int) -> list[str]:
            messages = [{"role": "system", "content": draw_text("system", SYSTEM)}]
            for turn in range(TURNS):
                messages.append({"role": "user", "content": draw_text((number, turn), USER)})
                messages.append({"role": "assistant", "content": await self.ask(client, messages)})
            return [message["content"] for message in messages[2::2]]

        async def work(client: AsyncOpenAI) -> Any:
            return await asyncio.gather(*(converse(client, number) for number in range(count)))

        return self.run(work)

    def send_unrelated(self, numbers: range) -> dict[str, Any]:
        """Send prompts without common prefixes, 32 at a time. `numbers` are the seeds of their texts."""

        async def work(client: AsyncOpenAI) -> Any:
            limit = asyncio.Semaphore(32)

            async def ask_one(number: int) -> str:
                async with limit:
                    return await self.ask(client, [{"role": "user", "content": draw_text(number, 60)}], 8)

            return await asyncio.gather(*map(ask_one, numbers))

        return self.run(work)


def start_load(folder: Path, kind: str, options: list[str]) -> Load:
    """Start a server and warm it up with two prompts."""
    load = Load(Server(32, ["--model", str(folder), "--name", "m", "--dtype", "float64", *SERVED[kind], *options]))
    load.send_unrelated(range(-200, -198))
    return load


def run_on_server(folder: Path, kind: str, options: list[str], work: Any) -> dict[str, Any]:
    """Start a server, run `work(load)`, stop the server; return the result of `work`."""
    load = start_load(folder, kind, options)
    try:
        return work(load)
    finally:
        load.server.stop()


def measure_costs(folder: Path, kind: str, turns: int) -> dict[str, Any]:
    """Measure a server's CPU time with the prefix cache over that without, for prompts without common prefixes."""
    options_of: dict[str, list[str]] = {"kept": [], "none": ["--prefix-memory", "0"]}
    servers, ratios = {name: start_load(folder, kind, options) for name, options in options_of.items()}, []
    try:
        for turn in range(-1, turns):  # turn -1 warms up and is not counted
            prompts = range(128 * turn, 128 * (turn + 1))
            took = {name: load.send_unrelated(prompts)["cpu_seconds"] for name, load in servers.items()}
            ratios += [took["kept"] / took["none"]] if turn >= 0 else []
    finally:
        for load in servers.values():
            load.server.stop()
    return {
        "median": round(statistics.median(ratios), 3),
        "quartiles": np.quantile(ratios, (0.25, 0.75)).round(3).tolist(),
    }


def measure_kind(kind: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure conversations, and prompts without common prefixes, on one kind of model."""
    options_of = {"kept": ["--prefix-memory", str(BUDGET)], "none": ["--prefix-memory", "0"]}
    talks = {
        name: run_on_server(folder, kind, options, lambda load: load.conversations(args.conversations))
        for name, options in options_of.items()
    }
    answers = [talks[name].pop("answers") for name in options_of]
    differ = sum(a != b for kept, plain in zip(*answers, strict=True) for a, b in zip(kept, plain, strict=True))
    costs = {"narrow": measure_costs(folder, kind, args.turns)}
    with tempfile.TemporaryDirectory() as wide:
        costs["wide"] = measure_costs(write_checkpoint(kind, Path(wide), WIDE), kind, args.turns)
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
    parser.add_argument("--turns", type=int, default=9, help="rounds of 128 prompts without common prefixes")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    result: dict[str, Any] = {"turns": TURNS, "system": SYSTEM, "user": USER, "answer": ANSWER}
    for kind in SERVED:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure_kind(kind, write_checkpoint(kind, Path(folder)), args)
            result[kind] = measured | {"load": round(os.getloadavg()[0], 1)}
        print(kind, json.dumps(result[kind], indent=1), flush=True)
    write_result(args.out, result)
    sys.exit(any(result[kind]["answers_differ"] or result[kind]["positions_ratio"] > 0.4 for kind in SERVED))


if __name__ == "__main__":
    main()
