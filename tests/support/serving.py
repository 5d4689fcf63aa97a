"""A server in a thread, and models that answer with a fixed text."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import uvicorn
from tokenized_models import byte_level_tokenizer
from torch import Tensor, nn

import paradec
from paradec.integrations.server.app import build_app
from paradec.integrations.server.engine import Engine

if TYPE_CHECKING:
    from openai import OpenAI

NAME = "tiny"
SORT = "Sort: pear fig apple"
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0}
LONG |= {"paradec": {"sampler": "low_confidence", "eos_early_stop": False}}
"""Fields of a request that takes 400 steps."""


class Running:
    """A running server and its address."""

    def __init__(self, engine: Engine, app: Any, port: int):
        self.engine, self.app, self.port = engine, app, port
        self.address = f"http://127.0.0.1:{port}"

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, str], str]:
        """Send a request; return status, headers and text of the response. body: a JSON value, or raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.send(data, path, **headers) as connection:
            response = b""
            while piece := connection.recv(65536):
                response += piece
        head, _, text = response.decode().partition("\r\n\r\n")
        status_line, *lines = head.split("\r\n")
        fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(status_line.split()[1]), fields, text

    def send(self, data: bytes, path: str = "/v1/chat/completions", **headers: str) -> socket.socket:
        """Send a request and return the connection, without reading the response."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        fields = {"Host": "x", "Connection": "close", "Content-Type": "application/json"}
        fields |= {"Content-Length": str(len(data))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return connection


def chat(text: str = SORT, **fields: Any) -> dict[str, Any]:
    """Return the body of a request to /v1/chat/completions."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def wait(is_true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(model: Any, *, batch_size: int = 4, request: dict | None = None, **options: Any) -> Iterator[Running]:
    """Serve a model until the block ends. request: default fields of requests. options: arguments of `build_app`."""
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


SCRIPT_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "<|im_start|>assistant\n{{ '<think>\n' if thinks }}"
)
BEGIN = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


class Scripted(nn.Module):
    """Predict the tokens of `text`, then the end token, after the last `BEGIN` of the prompt."""

    def __init__(self, tokenizer: Any, text: str):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=len(tokenizer), max_position_embeddings=2048)
        self.begin = token_ids(tokenizer, BEGIN)
        self.answer = [*token_ids(tokenizer, text), tokenizer.eos_token_id]

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        for row, tokens in enumerate(ids.tolist()):
            size = len(self.begin)
            ends = [i + size for i in range(len(tokens) - size + 1) if tokens[i : i + size] == self.begin]
            answer_start = (ends or [1])[-1]  # 1 in prompts without `BEGIN`
            for position in range(answer_start - 1, len(tokens)):
                logits[row, position, self.answer[min(position + 1 - answer_start, len(self.answer) - 1)]] = 30.0
        return logits


def token_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@contextmanager
def scripted(
    text: str, markers: Sequence[str] = (), template: str = SCRIPT_TEMPLATE
) -> Iterator[tuple[Running, OpenAI, list[int]]]:
    """Yield a server whose model answers `text`, its client, and the ids of `text`. markers: added special tokens."""
    tokenizer = byte_level_tokenizer("<|im_end|>")
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *markers]})
    tokenizer.chat_template = template
    facts = {"prediction": "shifted", "topology": "causal", "eos_token_id": tokenizer.eos_token_id}
    model = paradec.wrap(Scripted(tokenizer, text), tokenizer=tokenizer, **facts)
    with running(model, request={"sampler": "sjd"}) as server:
        from openai import OpenAI

        client = OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)
        yield server, client, token_ids(tokenizer, text)
