"""A server in a thread, for tests."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from paradec.integrations.server.app import build_app
from paradec.integrations.server.engine import Engine

NAME = "tiny"
SORT = "Sort: pear fig apple"
LONG: dict[str, Any] = {
    "max_tokens": 400,
    "temperature": 1.0,
    "paradec": {"sampler": "low_confidence", "eos_early_stop": False},
}
"""What takes hundreds of steps."""


class Running:
    """What a test asks."""

    def __init__(self, engine: Engine, app: Any, port: int):
        self.engine, self.app, self.port = engine, app, port
        self.address = f"http://127.0.0.1:{port}"

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer. body: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.send(data, path, **headers) as wire:
            answer = b""
            while piece := wire.recv(65536):
                answer += piece
        head, _, text = answer.decode().partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        found = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(first.split()[1]), found, text

    def send(self, data: bytes, path: str = "/v1/chat/completions", **headers: str) -> socket.socket:
        """The connection of a request that is sent and not read."""
        wire = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        given = {
            "Host": "x",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
        }
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        wire.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return wire


def chat(text: str = SORT, **more: Any) -> dict[str, Any]:
    """A body for /v1/chat/completions."""
    return {"messages": [{"role": "user", "content": text}], **more}


def wait(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(
    model: Any, *, batch_size: int = 4, request: dict[str, Any] | None = None, **options: Any
) -> Iterator[Running]:
    """A server of its own; on leaving no thread of it is left."""
    engine = Engine(model, batch_size=batch_size, **(request or {}))
    app = build_app(engine, **{"name": NAME, **options})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        wait(lambda: server.started)
        try:
            yield Running(engine, app, listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
    assert not engine._thread.is_alive()
