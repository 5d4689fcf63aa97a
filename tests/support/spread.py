"""Checks of models that are spread over processes: the processes, and what each of them does.

`in_ranks("name", arguments)` calls a function of `CHECKS` in each of two new processes that make one process group, as
torchrun starts them but for one import of the libraries, and returns what each gave.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from places import GOLDEN, SUPPORT

import paradec
from paradec.batching.batch import Batch
from paradec.models import tensor_parallel
from paradec.models.adapter import Model

PROMPTS = [[5, 6, 7, 8, 9, 4], [5, 6, 7, 8], [5, 6, 7, 10, 11, 12, 13, 14, 15, 16]]
SPARSE = paradec.SparseD(select=0.3, block_size=2, dense_steps=2)
REQUEST: dict[str, Any] = {
    "max_new_tokens": 12,
    "block_length": 4,
    "temperature": 0.7,
    "seed": 3,
    "eos_early_stop": False,
}


def in_ranks(check: str, arguments: Any = None, size: int = 2, timeout: float = 240) -> list[Any]:
    """What a check gave in each process, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SUPPORT / "spread.py"), check, str(size), folder, json.dumps(arguments)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        package = Path(paradec.__file__).parent.parent
        environment |= {"PYTHONPATH": os.pathsep.join([str(package), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **streams)
        try:
            printed = process.communicate(timeout=timeout)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, printed[-4000:]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def main(check: str, size: str, folder: str, arguments: str) -> int:
    """Fork the processes; how many of them failed."""
    torch.set_num_threads(1)
    import transformers.distributed.tensor_parallel
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (once, for all)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(int(size)):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                found = CHECKS[check](rank, **(json.loads(arguments) or {}))
                Path(folder, f"{rank}.json").write_text(json.dumps(found))
                while rank == 0 and len(list(Path(folder).glob("*.json"))) < int(size):  # it holds the store
                    time.sleep(0.02)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    for _ in children:
        ended, status = os.wait()
        if status:  # as torchrun does
            for child in children:
                if child != ended:
                    os.kill(child, signal.SIGKILL)
            return 1
    return 0


def place_of(name: str, folder: str | None) -> Path:
    """The checkpoint of a format; `folder` holds those that are not golden."""
    return GOLDEN / name if folder is None or (GOLDEN / name).is_dir() else Path(folder, name)


def answers(model: Model, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a model answers to each case, and what that took."""
    found = []
    for case in cases:
        request = REQUEST | case
        if request.pop("sparse", False):
            request["attention"] = SPARSE
        out = paradec.generate(model, PROMPTS, **request)
        entry: dict[str, Any] = {"tokens": out.new_tokens.tolist(), "nfe": out.row_nfe}
        entry["store"] = 0 if out.cost is None else out.cost.store_bytes
        if out.attention is not None:
            entry["sparse"] = sum(out.attention.sparse_calls)
            entry["pattern"] = out.attention.pattern_bytes
        found.append(entry)
    return found


def grid(rank: int, formats: dict[str, list[dict[str, Any]]], folder: str | None = None) -> Any:
    """The answers of every format to its cases."""
    return {
        name: answers(paradec.load(place_of(name, folder), dtype="float64", tp_plan="auto"), cases)
        for name, cases in formats.items()
    }


def refused(call: Callable[[], Any]) -> str:
    """The type and the message of what a call raises."""
    try:
        return f"nothing: {call()!r}"
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def loads(rank: int, folder: str) -> dict[str, Any]:
    """What becomes of checkpoints that one rank cannot read, or that differ."""
    source, broken = GOLDEN / "llada-tiny", Path(folder, "broken")
    found = {"half a checkpoint": refused(lambda: paradec.load(broken if rank else source, tp_plan="auto"))}
    other = GOLDEN / "dream-tiny" if rank else source
    return found | {"another checkpoint": refused(lambda: paradec.load(other, tp_plan="auto"))}


def requests(rank: int) -> dict[str, Any]:
    """What ranks that ask for different things decode, what is refused, and how a failure ends."""
    model = paradec.load(GOLDEN / "llada-tiny", dtype="float64", tp_plan="auto")
    found: dict[str, Any] = {}

    def asked(prompt: Any = PROMPTS, **request: Any) -> Any:
        return paradec.generate(model, prompt, **(REQUEST | request)).new_tokens.tolist()

    found["prompt"] = asked(prompt=[[5, 6, 7 + rank]])
    found["seed"] = asked(seed=3 + rank)
    found["request"] = asked(sampler=["threshold", "credit"][rank], max_new_tokens=12 - 4 * rank)
    torch.manual_seed(rank)
    found["drawn"] = [asked(seed=None), torch.initial_seed()]
    generator = torch.Generator().manual_seed(5 + rank)
    found["generator"] = asked(seed=None, generator=generator)
    reference = {"sampler": "low_confidence", "prompt": PROMPTS[:1], "rng": "reference", "seed": None, "cache": "none"}
    found["reference"] = asked(**reference, generator=generator)
    for name, call in {
        "Batch": lambda: Batch(model),
        "generate_many": lambda: list(paradec.generate_many(model, PROMPTS)),
        "update_weights": lambda: model.update_weights({}),
        "save_pretrained": lambda: model.save_pretrained("nowhere"),
        "a copy or pickle": lambda: copy.deepcopy(model),
        "too long": lambda: asked(cache="dual", max_new_tokens=10**6),
        "thread": lambda: in_thread(asked),
    }.items():
        found[name] = refused(call)

    def failing(state: Any, commit: Any) -> None:
        if rank or not alone:
            raise ZeroDivisionError("of its own")

    failing_request: dict[str, Any] = {"callback": failing, "sampler": "low_confidence"}
    alone = False
    found["all"] = refused(lambda: asked(**failing_request))
    found["again"] = asked()
    alone, begin = True, time.monotonic()
    tensor_parallel.FAILURE_WAIT = timedelta(seconds=1)
    found["one"] = refused(lambda: asked(**failing_request))
    found["seconds"] = time.monotonic() - begin
    if rank:
        found["after"] = refused(asked)
    return found


def in_thread(call: Callable[[], Any]) -> None:
    """Call in a thread, and raise here what it raises there."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def command(rank: int, words: list[str]) -> list[Any]:
    """The exit code of a command in each process, and what it prints."""
    from paradec.cli.app import app

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        kept = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
        code: Any = None
        try:
            app(words)
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout, sys.stderr = kept
        for stream in (out, err):
            stream.seek(0)
        return [code, out.read(), err.read()]


def short(rank: int, formats: Any, folder: str, words: list[str]) -> dict[str, Any]:
    """What the default suite asks for, of one pair of processes."""
    return {
        "loads": loads(rank, folder),
        "grid": grid(rank, formats, folder),
        "command": command(rank, words),
        "requests": requests(rank),
    }


CHECKS: dict[str, Callable[..., Any]] = {"short": short, "grid": grid}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
