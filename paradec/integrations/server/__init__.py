"""A server with OpenAI's endpoints over a batch that stays full: `paradec serve`.

| file | what it is |
|---|---|
| `engine.py` | the batch and the one thread that steps it |
| `asked.py` | a body of JSON becomes a prompt and changes of the request |
| `formats.py` | what an answer must be: `response_format`, `structured_outputs`, calls that are required |
| `tools.py` | messages and tools of a chat; how calls are read from answers |
| `choices.py` | several answers to one request |
| `scores.py` | log-probabilities as OpenAI's endpoints write them |
| `streams.py` | ids that are final become text in a queue; what OpenAI's stop sequences cut off |
| `hosts.py` | subclasses of transformers' model and generation managers; how many tokens may be asked for at once |
| `handlers.py` | subclasses of transformers' handlers of the two endpoints |
| `decisions.py` | transformers' endpoint for typed questions, over `paradec.decide` |
| `gate.py` | keys, sizes, how many at once, clients that go away |
| `metrics.py` | counts for Prometheus |
| `app.py` | all of it put together, and the page at `/`; `serve` runs it |

Schemas, server-sent events, tool calls and reasoning are those of `transformers serve`. Its classes are private:
paradec was tried with transformers 5.23 (`TRIED`), and `tests/integrations/server/test_contract.py` says what is
relied on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import socket
from typing import Any

TRIED = (">=5.23", "<5.24")
"""Releases of transformers that the server was tried with: it uses private classes of theirs."""
NEEDED = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client")
"""What the extra `serve` installs."""
LATER = {"Engine": "engine", "build_app": "app", "serve": "app"}


def check_installed() -> None:
    """Raise ImportError unless the extra `serve` is installed; the message names what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the server needs {', '.join(missing)}: install paradec's extra 'serve', e.g. pip install -e '.[serve]'"
        )
    found = importlib.metadata.version("transformers")
    if not tried(found):
        raise ImportError(
            f"the server extends private classes of transformers{','.join(TRIED)}, not {found}: "
            "install paradec's extra 'serve', e.g. pip install -e '.[serve]'"
        )


def tried(version: str) -> bool:
    """Whether the server was tried with this release of transformers."""
    from packaging.specifiers import SpecifierSet  # transformers needs it too

    return SpecifierSet(",".join(TRIED)).contains(version, prereleases=True)


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

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
