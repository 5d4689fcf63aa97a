"""Limits in front of the endpoints (keys, sizes, requests and tokens at once, clients that leave or stall); errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from paradec.batching.slots import Cancelled, Ticket
from paradec.constraints.automaton import ConstraintSizeError
from paradec.core.checks import shown
from paradec.integrations.server.engine import Engine, EngineStopped, Metrics

log = logging.getLogger(__name__)
PATHS = {
    "POST /v1/chat/completions": "a chat, through the model's chat template",
    "POST /v1/completions": "text as it is",
    "POST /v1/systemone": "questions about a text, answered with probabilities",
    "GET /v1/models": "the model that is served",
    "GET /health": "200, or 503 after decoding has stopped",
    "GET /metrics": "counts and times, for Prometheus",
}
OPEN_PATHS = ("/", "/health")  # these need no key
MAX_DRAINED = 64 * 2**20
"""Bytes of a refused body that are read and dropped, so that a client that still sends reads the response."""
CALL = "paradec.call"
"""The key of the `Call` in the ASGI scope."""
MAX_MESSAGE = 2000  # characters; a message may quote a body
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLIENT_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
"""The body's fields by the fields of `paradec.Request` with another name."""


class ApiError(Exception):
    """An error for the client: HTTP status, the body's field, headers of the response."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, **headers: Any):
        super().__init__(message[:MAX_MESSAGE])
        self.status, self.param = status, param
        self.headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}

    def to_response(self) -> JSONResponse:
        """The response of this error."""
        return JSONResponse(self.body, self.status, self.headers)


def to_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Convert an error of the library: a client can correct a ValueError or TypeError."""
    message = str(error) or f"{type(error).__name__} in the server"
    for inner, outer in CLIENT_NAMES.items():
        message = re.sub(rf"\b{inner}\b", outer, message)
    if isinstance(error, Cancelled):
        return ApiError("the answer was broken off: the server is stopping, or the client has gone", 503)
    if isinstance(error, EngineStopped):
        return ApiError(message, 503, retry_after="5")
    if not isinstance(error, (ValueError, TypeError, ModuleNotFoundError)):
        return ApiError(message, 500)
    name = re.match(r"(\w+)=", message)
    status = 422 if isinstance(error, ConstraintSizeError) else 400
    return ApiError(message, status, param or (name[1] if name else None))


def from_validation(error: RequestValidationError) -> ApiError:
    """Convert the first error of pydantic."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError("the body is not JSON")
    if not (path := first["loc"][1:]):
        return ApiError("the body must be a JSON object (content-type application/json)", 422)
    value = "" if first["type"] == "missing" else f"={shown(first['input'])}"
    reason = " ".join(first["msg"].removeprefix("Value error, ").split())
    return ApiError(f"{shown('.'.join(map(str, path)))[1:-1]}{value}: {reason}", 422, shown(str(path[0]))[1:-1])


class Call:
    """One HTTP request: its prompts in the batch and its tokens of work. It ends when the client leaves."""

    def __init__(self, limits: Limits):
        self.limits, self.has_ended = limits, False
        self._tickets, self._reserved = list[Ticket](), 0

    def reserve(self, tokens: int) -> None:
        """Reserve the tokens of a prompt and its answer until the end, from any thread.

        Raises:
            ApiError: 400 if they never fit; 429 if they do not fit now.
        """
        limits, limit = self.limits, self.limits.max_work
        if tokens > limit:
            raise ApiError(f"{tokens} tokens of prompt and answer are more than this server takes, {limit}")
        with limits.lock:
            if limits.num_reserved + tokens > limit:
                used = f"{limits.num_reserved} tokens are being answered or wait, and {tokens} more are beyond {limit}"
                raise ApiError(f"{used}; try again", 429, retry_after=limits.engine.retry_after())
            limits.num_reserved += tokens
            self._reserved += tokens

    def submit(self, prompt: Any, **arguments: Any) -> None:
        """Give a prompt to the engine; see `Engine.submit`."""
        self._tickets.append(self.limits.engine.submit(prompt, **arguments))
        if self.has_ended:
            self.end()

    def end(self) -> None:
        """Cancel unfinished prompts and give the tokens back."""
        self.has_ended = True
        with self.limits.lock:
            self.limits.num_reserved -= self._reserved
            self._reserved = 0
        for ticket in self._tickets:
            self.limits.engine.cancel(ticket)


@dataclass
class Limits:
    """An ASGI middleware, which gives each POST request a `Call`.

    Args:
        api_key: the key in "Authorization: Bearer ..."; None admits everybody.
        max_body: bytes of a body.
        max_requests: requests that are handled at once; more get 429.
        max_work: tokens of prompts and possible answers at once; more get 429.
        timeout: seconds in which a client must send its body, or take a piece of an answer.
    """

    app: Any
    engine: Engine
    metrics: Metrics
    api_key: str | None = None
    max_body: int = 2**20
    max_requests: int = 512
    max_work: int = 2**20
    timeout: float = 60.0

    def __post_init__(self) -> None:
        self.num_running = self.num_reserved = 0
        self.lock = threading.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, is_stuck = time.perf_counter(), 499, False  # 499: the client left before an answer

        async def send_in_time(message: Any) -> None:
            nonlocal status, is_stuck
            status = message.get("status", status)
            try:
                await asyncio.wait_for(send(message), self.timeout)
            except TimeoutError:
                is_stuck = True
                raise

        try:
            await self._handle(scope, receive, send_in_time)
        except ApiError as error:
            await error.to_response()(scope, receive, send_in_time)
        except Exception:
            if not is_stuck:
                raise
            log.warning("a client did not read its answer for %s s", self.timeout)
        finally:
            path = scope["path"] if f"{scope['method']} {scope['path']}" in (*PATHS, "GET /") else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)

    def _check(self, scope: Any) -> None:
        """Raise ApiError for a wrong key, or too many requests."""
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if self.api_key is not None and scope["path"] not in OPEN_PATHS:
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.api_key.encode()):
                raise ApiError("the API key is missing or wrong", 401, www_authenticate="Bearer")
        if scope["method"] == "POST" and self.num_running >= self.max_requests:
            wait = self.engine.retry_after()
            raise ApiError(f"{self.num_running} requests are being answered; try again", 429, retry_after=wait)

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            self._check(scope)
        except ApiError:
            await self._read_body(receive, 0)
            raise
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        self.num_running += 1
        try:
            if (body := await self._read_body(receive, self.max_body)) is not None:
                await self._answer(scope, receive, send, body)
        finally:
            self.num_running -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any, body: bytes) -> None:
        """Run the application with a body that was read, and watch whether the client leaves."""
        messages, call = [{"type": "http.request", "body": body, "more_body": False}], Call(self)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.end()

        async def replay() -> Any:
            if messages:
                return messages.pop()
            await asyncio.wait([watcher])
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(watch())
        try:
            await self.app({**scope, CALL: call}, replay, send)
        finally:
            call.end()
            watcher.cancel()

    async def _read_body(self, receive: Any, limit: int) -> bytes | None:
        """Read a body of at most `limit` bytes, where 0 drops all; None if the client leaves. Raises ApiError."""
        body, length, message = bytearray(), 0, {"more_body": True}
        try:
            async with asyncio.timeout(self.timeout):
                while message.get("more_body") and length <= limit + MAX_DRAINED:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    length += len(message.get("body", b""))
                    body += message.get("body", b"") if length <= limit else b""
        except TimeoutError:
            reason = f"the body did not come within {self.timeout:g} s"
            raise ApiError(reason, 408, connection="close") from None
        if length > limit > 0:
            raise ApiError(f"the body is longer than {limit} bytes", 413, connection="close")
        return bytes(body)
