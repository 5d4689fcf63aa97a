"""`paradec serve` under load and with misbehaving clients, with the packaged model and OpenAI's client.

    python benchmarks/server.py                              # minutes on two cores
    python benchmarks/server.py --requests 300 --out runs/server.json
    python benchmarks/server.py --url http://127.0.0.1:8000/v1 --requests 100 --at-once 16   # any server, see below

First, requests are sent one at a time. Then 200 are sent at the same time, half of them as streams. Then good requests
mix with bad clients: these disconnect, read slowly, or send too much, no JSON, no key or an unknown preset. --requests
is the total of these. Last, good requests mix with --hostile bodies from `hostile.py`.

Checked: no good request is lost, every answer equals that of `paradec.generate`, every bad request gets the expected
status, no body stops the server. Afterwards the server must have no additional rows, threads or files, and at most 300
MB more memory than before the hostile bodies. Exits with 1 if a check fails.

--url measures a running server with OpenAI's chat API instead. All requests are streams; measured are throughput, and
medians and 95th percentiles of the latency and of the time to the first token. --model defaults to the first that the
server lists; the key is the environment variable OPENAI_API_KEY. Exits with 1 if a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import numpy as np
from openai import AsyncOpenAI, OpenAIError
from provenance import write_result

import paradec
from paradec.core.packaged import WORDS

KEY = "key-of-the-benchmark"
MODEL = "packaged"
AT_ONCE = 200
REASONING = ("reasoning_content", "reasoning")
RESULT = Path(__file__).parent / "results" / "server.json"


def make_prompts(count: int) -> list[str]:
    """Make prompts of the packaged model's tasks."""
    draw = random.Random(1)
    tasks = ("Sort", "Reverse", "Copy")
    return [f"{draw.choice(tasks)}: {' '.join(draw.sample(WORDS, draw.randint(3, 6)))}" for _ in range(count)]


class Server:
    """Subprocess of the command `paradec serve`, with the packaged model unless `options` name another."""

    def __init__(self, batch: int, options: Sequence[str] = ()):
        command = [sys.executable, "-m", "paradec", "serve", "--port", "0", "--batch", str(batch), *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PARADEC_API_KEY": KEY}
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert match, f"the server did not start: {line!r}"
        self.port = int(match[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def metrics(self) -> dict[str, float]:
        """Read the values of /metrics, by name."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics", headers={"authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def count_resources(self) -> dict[str, int]:
        """Count the server's rows, waiting prompts, threads and open files."""
        place, counts = Path(f"/proc/{self.process.pid}"), self.metrics()
        return {
            "rows": int(counts["paradec_rows_occupied"]),
            "waiting": int(counts["paradec_prompts_waiting"]),
            "threads": len(list((place / "task").iterdir())),
            "files": len(list((place / "fd").iterdir())),
        }

    def megabytes(self) -> int:
        """Read the resident memory in MB."""
        match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert match
        return int(match[1]) // 1024

    def wait_for_release(self, before: dict[str, int], seconds: float = 60) -> dict[str, int]:
        """Wait, at most `seconds`, until no count of `count_resources` exceeds that in `before`: idle connections and
        threads end with a delay. Returns the last counts."""
        end = time.monotonic() + seconds
        counts = self.count_resources()
        while any(counts[name] > before[name] for name in before) and time.monotonic() < end:
            time.sleep(0.5)
            counts = self.count_resources()
        return counts

    def stop(self) -> None:
        """Stop the server with SIGTERM."""
        self.process.terminate()
        self.process.wait(30)


class Answer(NamedTuple):
    """One answer. Times are in seconds from the request's start."""

    text: str
    tokens: int
    seconds: float
    first_token: float | None = None
    """Time of a stream's first text or reasoning; None without a stream."""


async def ask(client: AsyncOpenAI, prompt: str, stream: bool, **fields: Any) -> Answer:
    """Send a prompt; `fields` are further fields of the request."""
    began = time.perf_counter()
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], **fields}
    if not stream:
        whole = await client.chat.completions.create(**chat)
        return Answer(whole.choices[0].message.content, whole.usage.completion_tokens, time.perf_counter() - began)
    text, tokens, first_token = "", 0, None
    more: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(**chat, **more):
        deltas = [choice.delta for choice in chunk.choices]
        text += "".join(delta.content or "" for delta in deltas)
        if first_token is None and any(
            delta.content or any(getattr(delta, name, None) for name in REASONING) for delta in deltas
        ):
            first_token = time.perf_counter() - began
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return Answer(text, tokens, time.perf_counter() - began, first_token)


async def load(
    url: str,
    prompts: list[str],
    texts: list[str] | None,
    at_once: int,
    *,
    model: str | None = MODEL,
    key: str = KEY,
    **fields: Any,
) -> dict[str, Any]:
    """Send prompts, `at_once` at a time, and measure times and losses.

    With the expected answers `texts`, every second request is a stream. With texts=None all are, and answers are not
    compared. model=None takes the first model that the server lists. `fields` are further fields of each request.
    """
    limit = asyncio.Semaphore(at_once)
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=600) as client:
        fields["model"] = model or (await client.models.list()).data[0].id

        async def ask_one(number: int) -> Answer:
            async with limit:
                return await ask(client, prompts[number], stream=texts is None or number % 2 == 1, **fields)

        began = time.perf_counter()
        results = await asyncio.gather(*map(ask_one, range(len(prompts))), return_exceptions=True)
        seconds = time.perf_counter() - began
    lost = [answer for answer in results if isinstance(answer, BaseException)]
    good = [answer for answer in results if not isinstance(answer, BaseException)]
    wrong = sum(
        not isinstance(answer, BaseException) and answer.text != text
        for answer, text in zip(results, texts or (), strict=texts is not None)
    )
    took = [answer.seconds for answer in good]
    first = [answer.first_token for answer in good if answer.first_token is not None]

    def percentile(times: list[float], percent: int) -> float | None:
        return round(float(np.percentile(times, percent)), 4) if times else None

    return {
        "requests": len(prompts),
        "at_once": at_once,
        "lost": len(lost),
        "first_loss": repr(lost[0]) if lost else None,
        "differ": wrong,
        "p50_seconds": percentile(took, 50),
        "p95_seconds": percentile(took, 95),
        "p99_seconds": percentile(took, 99),
        "p50_first_token_seconds": percentile(first, 50),
        "p95_first_token_seconds": percentile(first, 95),
        "requests_per_second": round(len(good) / seconds, 2),
        # 0 if the server reports no usage
        "tokens_per_second": round(sum(answer.tokens for answer in good) / seconds, 1),
        "seconds": round(seconds, 2),
    }


def send_raw(port: int, body: bytes, *, key: str | None = KEY, read: str = "all", length: int | None = None) -> int:
    """Send a request over a plain socket, with `length` as a wrong Content-Length; return the HTTP status. With
    read="slowly" the answer is read slowly; with read="nothing" disconnect at once and return 0."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as wire:
        if read == "slowly":
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        bearer = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{bearer}Connection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
        wire.sendall(head.encode() + body)
        if read == "nothing":
            return 0
        answer = b""
        while piece := wire.recv(16 if read == "slowly" else 65536):
            answer += piece
            if read == "slowly":
                time.sleep(0.005)
    return int(answer.split(b" ", 2)[1])


def chat(prompt: str, **more: Any) -> bytes:
    """Build the body of a chat request."""
    return json.dumps({"messages": [{"role": "user", "content": prompt}], **more}).encode()


LONG = {"max_tokens": 400, "temperature": 1.0, "paradec": {"sampler": "low_confidence", "eos_early_stop": False}}
"""Fields of a request that takes many steps, so that clients can disconnect while it runs."""
BAD: dict[str, tuple[Any, int]] = {
    "vanished stream": (lambda port, prompt: send_raw(port, chat(prompt, stream=True, **LONG), read="nothing"), 0),
    "vanished": (lambda port, prompt: send_raw(port, chat(prompt, **LONG), read="nothing"), 0),
    "vanished within its body": (lambda port, prompt: send_raw(port, b'{"mess', read="nothing", length=500), 0),
    "10 MB": (lambda port, prompt: send_raw(port, chat("x" * 10_000_000)), 413),
    "no JSON": (lambda port, prompt: send_raw(port, b'{"messages": [{"role"'), 400),
    "unknown preset": (lambda port, prompt: send_raw(port, chat(prompt, preset="none of ours")), 400),
    "no key": (lambda port, prompt: send_raw(port, chat(prompt), key=None), 401),
    "wrong key": (lambda port, prompt: send_raw(port, chat(prompt), key="another"), 401),
    "unknown word": (lambda port, prompt: send_raw(port, chat("Hello")), 400),
    "slow reader": (lambda port, prompt: send_raw(port, chat(prompt, stream=True), read="slowly"), 200),
}


async def misbehave(port: int, prompts: list[str], counts: dict[str, int], wrong: list[str]) -> None:
    """Run a bad client per prompt, of all kinds in turn, eight at a time. Adds to `counts` by kind, and messages about
    unexpected statuses to `wrong`."""
    limit = asyncio.Semaphore(8)

    async def run_client(number: int) -> None:
        name = list(BAD)[number % len(BAD)]
        act, expected = BAD[name]
        async with limit:
            status = await asyncio.to_thread(act, port, prompts[number])
        counts[name] = counts.get(name, 0) + 1
        if status != expected:
            wrong.append(f"{name}: status {status}, not {expected}")

    await asyncio.gather(*(run_client(number) for number in range(len(prompts))))


async def attack(port: int, bodies: list[bytes], counts: dict[str, int], wrong: list[str]) -> None:
    """Send hostile bodies, eight at a time. Adds to `counts` by status, and to `wrong` for statuses other than 200 and
    expected client errors."""
    limit = asyncio.Semaphore(8)

    async def send_body(body: bytes) -> None:
        async with limit:
            try:
                status = await asyncio.to_thread(send_raw, port, body)
            except OSError as error:
                status = repr(error)
        counts[f"hostile {status}"] = counts.get(f"hostile {status}", 0) + 1
        if status not in (200, 400, 404, 422):
            wrong.append(f"hostile: status {status} for {body[:300]!r}")

    await asyncio.gather(*(send_body(body) for body in bodies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--hostile", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, help="file of the result; without --url by default results/server.json")
    parser.add_argument("--url", help="a running server, http://HOST:PORT/v1, to measure instead")
    parser.add_argument("--model", help="with --url: the model's name there")
    parser.add_argument("--at-once", type=int, default=8, help="with --url: requests at a time")
    parser.add_argument("--max-tokens", type=int, help="with --url: most tokens of an answer; by default the server's")
    args = parser.parse_args()
    if args.url:
        key, questions = os.environ.get("OPENAI_API_KEY") or "none", make_prompts(args.requests)
        options = {"model": args.model, "key": key} | ({"max_tokens": args.max_tokens} if args.max_tokens else {})
        try:
            measured = asyncio.run(load(args.url, questions, None, args.at_once, **options))
        except OpenAIError as error:
            parser.error(f"--url {args.url}: {error}")
        del measured["differ"]
        print(json.dumps(measured))
        if args.out is not None:
            write_result(args.out, measured)
        sys.exit(1 if measured["lost"] else 0)

    model, prompts = paradec.load(), make_prompts(AT_ONCE)
    texts = [text for k in range(0, AT_ONCE, 50) for text in paradec.generate(model, prompts[k : k + 50]).text]
    server = Server(args.batch)
    try:
        asyncio.run(load(server.url, prompts, texts, 64))  # warm up: one-time work and threads
        before = server.count_resources()
        alone = asyncio.run(load(server.url, prompts[:40], texts[:40], 1))
        print("one at a time:", json.dumps(alone), flush=True)
        together = asyncio.run(load(server.url, prompts, texts, AT_ONCE))
        print("together:", json.dumps(together), flush=True)

        async def both(count: int, bad: Any) -> dict[str, Any]:
            questions = [prompts[number % AT_ONCE] for number in range(count)]
            answers = [texts[number % AT_ONCE] for number in range(count)]
            costs, _ = await asyncio.gather(load(server.url, questions, answers, 16), bad(questions))
            return costs

        counts: dict[str, int] = {}
        wrong: list[str] = []
        num_good = max(len(BAD), (args.requests - 248) // 2)
        among_bad = asyncio.run(both(num_good, lambda clients: misbehave(server.port, clients, counts, wrong)))
        print("among bad ones:", json.dumps(among_bad), counts, wrong[:5], flush=True)
        memory = server.megabytes()
        bodies = hostile.bodies(args.hostile, prompts[0])
        among_hostile = asyncio.run(both(args.hostile // 4, lambda _: attack(server.port, bodies, counts, wrong)))
        memory = server.megabytes() - memory
        print("among hostile ones:", json.dumps(among_hostile), counts, f"{memory:+} MB", wrong[:5], flush=True)
        after = server.wait_for_release(before)
        ends = {name: value for name, value in server.metrics().items() if name.startswith("paradec_answers_total")}
    finally:
        server.stop()
    result = {
        "batch": args.batch,
        "one_at_a_time": alone,
        "together": together,
        "among_bad_ones": among_bad,
        "among_hostile_ones": among_hostile,
        "megabytes_more": memory,
        "bad": counts,
        "wrong_status": len(wrong),
        "before": before,
        "after": after,
        "ends": ends,
    }
    write_result(args.out or RESULT, result)
    is_released = all(after[name] <= before[name] for name in before) and memory <= 300
    right = all(part["lost"] == part["differ"] == 0 for part in (alone, together, among_bad, among_hostile))
    print(json.dumps({"nothing_left": is_released, "all_right": right, "wrong_status": len(wrong)}))
    sys.exit(0 if is_released and right and not wrong else 1)


if __name__ == "__main__":
    main()
