"""Server with OpenAI's endpoints and continuous batching: `paradec serve`.

`app.py` has the routes, `limits.py` the middleware. `answers.py` checks a body (with `request_body.py`, `chat.py`),
decodes its prompts in the batch (`engine.py`) and builds the response (with `logprobs.py`)."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from paradec.core.checks import check_packages


def check_installed() -> None:
    """Raise ImportError unless the extra `serve` is installed; the message names the missing packages."""
    check_packages("the server", "serve", ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client"))


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raises OSError for an unusable address."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)


def __getattr__(name: str) -> Any:
    if name not in ("Engine", "build_app", "serve"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed()
    return getattr(importlib.import_module(f"{__name__}.app"), name)
