"""A server with OpenAI's endpoints over a batch that stays full: `paradec serve`.

`app.py` has the routes and `limits.py` what is in front of them. `answers.py` checks and encodes a body
(`request_body.py`, `chat.py`), gives it to the batch (`engine.py`) and writes the response or the stream
(`logprobs.py`). `decisions.py` is `/v1/systemone`.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from typing import Any

NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client")  # of the extra `serve`
LATER = {"Engine": "engine", "build_app": "app", "serve": "app"}


def check_installed() -> None:
    """Raise ImportError unless the extra `serve` is installed; the message names the missing packages."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ImportError(
            f"the server needs {', '.join(missing)}: install paradec's extra 'serve', e.g. pip install -e '.[serve]'"
        )


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Raises OSError for an address that cannot be used."""
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
