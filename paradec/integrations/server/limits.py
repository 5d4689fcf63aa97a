"""Errors for clients, and a middleware with limits: API key, size of bodies, concurrent work, time of slow clients."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paradec.batching.slots import BatchClosed, Cancelled, Ticket
from paradec.constraints.automaton import ConstraintSizeError
from paradec.core.checks import short_repr
from paradec.integrations.server.engine import Engine

log = logging.getLogger(__name__)
MAX_DRAINED = 64 * 2**20  # bytes read beyond `max_body`: clients may read the response only after sending the body
CALL = "paradec.call"  # key of the `Call` in the ASGI scope
MAX_MESSAGE = 2000  # characters; a message may quote a body
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLIENT_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}  # in a body


class ApiError(Exception):
    """An error for the client: HTTP status, the request body's field (`param`), headers of the response."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, **headers: Any):
        super().__init__(message[:MAX_MESSAGE])
        self.status, self.headers = status, {key.replace("_", "-"): str(value) for key, value in headers.items()}
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": str(self), "type": kind, "param": param, "code": None}}


def to_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Convert any error. param: body's field with a wrong value; None: the field at the start of the message."""
    message = str(error) or f"{type(error).__name__} in the server"
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            first = error.errors()[0]
            if first["type"] == "json_invalid" and len(first["loc"]) == 2:  # "body" and a position
                return ApiError("the body is not JSON")
            if not (path := first["loc"][1:]):
                return ApiError("the body must be a JSON object (content-type application/json)", 422)
            value = "" if first["type"] == "missing" else f"={short_repr(first['input'])}"
            reason = " ".join(first["msg"].removeprefix("Value error, ").split())
            field = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", short_repr(".".join(map(str, path)))[1:-1])
            return ApiError(f"{field}{value}: {reason}", 422, short_repr(path[0])[1:-1])
        case HTTPException():
            return ApiError(error.detail, error.status_code, **(error.headers or {}))
        case Cancelled() | BatchClosed():  # the server is stopping
            return ApiError(message, 503, retry_after=5)
        case ValueError() | TypeError() | ImportError():
            if param is None:
                message = re.sub(r"\w+", lambda word: CLIENT_NAMES.get(word[0], word[0]), message)
                param = name[1] if (name := re.match(r"(\w+)=", message)) else None
            return ApiError(message, 422 if isinstance(error, ConstraintSizeError) else 400, param)
    return ApiError(message, 500)


class Call:
    """One HTTP request, until it ends or the client leaves: its prompts in the batch, and its reserved tokens."""

    def __init__(self, limits: Limits):
        self.limits, self.has_ended, self.num_reserved, self._tickets = limits, False, 0, list[Ticket]()
        limits.calls.add(self)

    def reserve(self, tokens: int) -> None:
        """Reserve tokens until `end`; thread-safe. Raises ApiError: 400 above the limit, 429 if too few are free."""
        limits, limit = self.limits, self.limits.max_work
        if tokens > limit:
            raise ApiError(f"{tokens} tokens of prompts and answers exceed this server's limit of {limit} (--max-work)")
        with limits.lock:
            if (used := sum(call.num_reserved for call in tuple(limits.calls))) + tokens > limit:
                message = f"{used} tokens are in progress or waiting; {tokens} more exceed {limit}; try again"
                raise ApiError(message, 429, retry_after=limits.engine.retry_after())
            self.num_reserved += tokens

    def submit(self, prompt: Any, **arguments: Any) -> None:
        """Submit a prompt to the engine; see `Engine.submit`."""
        self._tickets.append(self.limits.engine.submit(prompt, **arguments))
        if self.has_ended:
            self.end()

    def end(self) -> None:
        """Cancel unfinished prompts and release the reserved tokens."""
        self.has_ended, self.num_reserved = True, 0
        self.limits.calls.discard(self)
        for ticket in self._tickets:
            self.limits.engine.batch.cancel(ticket)


@dataclass
class Limits:
    """ASGI middleware: creates a `Call` for each request, converts errors to responses, and counts requests.

    api_key: the key in "Authorization: Bearer ..."; None admits everybody. max_body: maximum size in bytes.
    max_requests, max_work: maximum number of concurrent requests, and of their tokens (prompts and answers); more get
    status 429. timeout: seconds to send a body, or to receive one piece of an answer."""

    app: Any
    engine: Engine
    api_key: str | None = None
    max_body: int = 2**20
    max_requests: int = 512
    max_work: int = 2**20
    timeout: float = 60.0
    calls: set[Call] = field(default_factory=set)
    lock: Any = field(default_factory=threading.Lock)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start_time, status = time.perf_counter(), 499  # 499: the client left before the response

        async def send_in_time(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await asyncio.wait_for(send(message), self.timeout)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.end()

        async def replay() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()  # waits until it is cancelled

        with ExitStack() as stack:
            try:
                self._check(scope)
                scope[CALL] = call = Call(self)
                stack.callback(call.end)
                messages = [{"type": "http.request", "body": await self._read_body(scope, receive)}]
                stack.callback(asyncio.create_task(watch()).cancel)
                await self.app(scope, replay, send_in_time)
            except ClientDisconnect:
                pass
            except Exception as error:
                failure = to_api_error(error)
                if status != 499 or failure.status == 500:
                    log.warning("%s %s broke off", scope["method"], scope["path"], exc_info=error)
                if status == 499:
                    await JSONResponse(failure.body, failure.status, failure.headers)(scope, receive, send_in_time)
            finally:
                paths = {route.path for route in getattr(scope.get("app"), "routes", ())}
                path = scope["path"] if scope["path"] in paths else "other"
                self.engine.metrics.requests.labels(path, str(status)).inc()
                self.engine.metrics.seconds.labels(path).observe(time.perf_counter() - start_time)

    def _check(self, scope: Any) -> None:
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if self.api_key is not None and scope["path"] != "/health":
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.api_key.encode()):
                raise ApiError("the API key is missing or wrong", 401, www_authenticate="Bearer")
        if scope["method"] == "POST":
            self.engine.batch.check_open()
            if len(self.calls) >= self.max_requests:
                raise ApiError("too many requests are open; try again", 429, retry_after=self.engine.retry_after())

    async def _read_body(self, scope: Any, receive: Any) -> bytes:
        body, length = bytearray(), 0
        try:
            async with asyncio.timeout(self.timeout):
                async for part in Request(scope, receive).stream():
                    length += len(part)
                    if length > self.max_body + MAX_DRAINED:
                        break
                    body += part if length <= self.max_body else b""
        except TimeoutError:
            raise ApiError(f"the body did not arrive within {self.timeout:g} s", 408, connection="close") from None
        if length > self.max_body:
            raise ApiError(f"the body is longer than {self.max_body} bytes", 413, connection="close")
        return bytes(body)
