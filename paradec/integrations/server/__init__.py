"""A server with OpenAI's endpoints over a batch that stays full: `paradec serve`.

| file | purpose |
|---|---|
| `app.py` | the application: routes, pages, errors; `serve` runs it |
| `limits.py` | keys, sizes, number of requests, tokens of work, clients that leave |
| `request_body.py` | the bodies of both endpoints, and the fields of `paradec.Request` in them |
| `response_format.py` | constraints: `response_format`, `structured_outputs`, required tool calls |
| `chat.py` | messages and tools: the prompt of a chat, and the parts of its answer |
| `answers.py` | the answers to one body: from the engine's tokens to text, whole or as a stream of events |
| `logprobs.py` | log-probabilities in the forms of both endpoints |
| `decisions.py` | `/v1/systemone`: typed questions, over `paradec.decide` |
| `engine.py` | the batch and its one thread |
| `metrics.py` | counts and times for Prometheus |
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from typing import Any

NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client")
"""Packages of the extra `serve`."""
LATER = {"Engine": "engine", "build_app": "app", "serve": "app"}


def check_installed() -> None:
    """Raise ImportError unless the extra `serve` is installed; the message names the missing packages."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the server needs {', '.join(missing)}: install paradec's extra 'serve', e.g. pip install -e '.[serve]'"
        )


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def __getattr__(name: str) -> Any:
    if name in LATER:
        check_installed()
        return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
