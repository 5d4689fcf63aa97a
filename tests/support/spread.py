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
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from places import GOLDEN, SUPPORT

import paradec
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
                while len(list(Path(folder).glob("*.json"))) < int(size):  # rank 0 holds the store
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


# ---- what is decoded -------------------------------------------------------------------------------------------------


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
        if request.pop("many", False):
            many = {name: value for name, value in request.items() if name != "share_prefix"}
            rows = list(paradec.generate_many(model, PROMPTS, batch_size=2, **many))
            found.append({"tokens": [row.new_tokens[0].tolist() for row in rows]})
            continue
        out = paradec.generate(model, PROMPTS, **request)
        entry: dict[str, Any] = {"tokens": out.new_tokens.tolist(), "nfe": out.row_nfe}
        entry["store"] = 0 if out.cost is None else out.cost.store_bytes
        if out.attention is not None:
            entry["sparse"] = sum(out.attention.sparse_calls)
            entry["pattern"] = out.attention.pattern_bytes
        found.append(entry)
    return found


def grid(rank: int, formats: dict[str, list[dict[str, Any]]], folder: str | None = None, **options: Any) -> Any:
    """The answers of every format to its cases."""
    return {
        name: answers(paradec.load(place_of(name, folder), dtype="float64", tp_plan="auto", **options), cases)
        for name, cases in formats.items()
    }


def refused(call: Callable[[], Any]) -> str:
    """The type and the message of what a call raises."""
    try:
        return f"nothing: {call()!r}"
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def differences(rank: int, folder: str) -> dict[str, Any]:
    """What becomes of ranks that were not given the same, one after the other, with one model."""
    found: dict[str, Any] = {}
    source, broken = GOLDEN / "llada-tiny", Path(folder, "broken")
    begin = time.monotonic()
    found["half a checkpoint"] = refused(lambda: paradec.load(broken if rank else source, tp_plan="auto"))
    found["seconds"] = time.monotonic() - begin
    other = GOLDEN / "dream-tiny" if rank else source
    found["another checkpoint"] = refused(lambda: paradec.load(other, tp_plan="auto"))
    model = paradec.load(source, dtype="float64", tp_plan="auto", tp_timeout=2.5)
    found["repr"] = repr(model)

    def asked(**request: Any) -> Any:
        return paradec.generate(model, request.pop("prompt", PROMPTS), **(REQUEST | request))

    found["prompt"] = refused(lambda: asked(prompt=[[5, 6, 7 + rank]]))
    found["seed"] = refused(lambda: asked(seed=rank))
    found["sampler"] = refused(lambda: asked(sampler=["threshold", "credit"][rank]))
    torch.manual_seed(rank)
    drawn = asked(seed=None)
    found["drawn"] = [drawn.new_tokens.tolist(), torch.initial_seed()]
    generator = torch.Generator().manual_seed(5)
    found["generator"] = asked(seed=None, generator=generator).new_tokens.tolist()
    reference = {"sampler": "low_confidence", "prompt": PROMPTS[:1], "rng": "reference", "seed": None, "cache": "none"}
    found["reference"] = asked(**reference).new_tokens.tolist()
    many = list(paradec.generate_many(model, [PROMPTS[0], [5, 6 + rank]], batch_size=2, **REQUEST))
    found["many"] = ["" if out.error is None else f"{type(out.error).__name__}: {out.error}" for out in many]
    found["copy"] = refused(lambda: copy.deepcopy(model))
    found["save"] = refused(lambda: model.save_pretrained(Path(folder, f"saved-{rank}")))
    in_thread: list[str] = []
    thread = threading.Thread(target=lambda: in_thread.append(refused(asked)))
    thread.start()
    thread.join()
    found["thread"] = in_thread[0]
    sysconf = os.sysconf
    if rank:  # one machine has less memory than the other
        os.sysconf = lambda name: 1 if name == "SC_PHYS_PAGES" else sysconf(name)
    found["memory"] = refused(lambda: asked(cache="dual"))
    os.sysconf = sysconf
    found["again"] = asked().new_tokens.tolist()
    found["embeddings"] = list(model.token_embeddings().shape)

    def changing(state: Any, commit: Any) -> None:
        if rank and state.done:
            state.canvas[2, -1] += 1

    again = paradec.load(source, dtype="float64", tp_plan="auto", tp_timeout=2.5)
    found["tokens"] = refused(lambda: paradec.generate(again, PROMPTS, **REQUEST, callback=changing))

    def failing(state: Any, commit: Any) -> None:
        if rank:
            raise ZeroDivisionError("of its own")

    found["callback"] = refused(lambda: asked(callback=failing, sampler="low_confidence"))
    found["after"] = refused(asked)
    return found


def command(rank: int, lines: list[list[str]]) -> list[Any]:
    """What commands print in each process, and their exit codes."""
    from paradec.cli.app import app

    found = []
    for words in lines:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            kept = sys.stdout, sys.stderr, sys.__stderr__
            sys.stdout, sys.stderr, sys.__stderr__ = out, err, err  # type: ignore[misc]
            try:
                app(words)
                code: Any = 0
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout, sys.stderr, sys.__stderr__ = kept  # type: ignore[misc]
            out.seek(0)
            err.seek(0)
            found.append([code, out.read(), err.read()])
    return found


def short(rank: int, formats: Any, folder: str, lines: list[list[str]]) -> dict[str, Any]:
    """What the default suite asks for, of one pair of processes."""
    return {
        "grid": grid(rank, formats, folder),
        "commands": command(rank, lines),
        "differences": differences(rank, folder),
    }


CHECKS: dict[str, Callable[..., Any]] = {
    "short": short,
    "grid": grid,
    "differences": differences,
    "command": command,
}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
