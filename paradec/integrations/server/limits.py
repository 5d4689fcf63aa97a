"""Limits in front of the endpoints: keys, sizes, how many requests and tokens at once, clients that leave or stall."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from typing import Any

from paradec.batching.slots import Ticket
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.errors import ApiError, error_body
from paradec.integrations.server.metrics import Metrics

log = logging.getLogger(__name__)
PATHS = ("/", "/v1/chat/completions", "/v1/completions", "/v1/systemone", "/v1/models", "/health", "/metrics")
OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""
MAX_DRAINED = 64 * 2**20
"""Bytes of a refused body that are read and dropped, so that a client that still sends reads the response."""
CALL = "paradec.call"
"""The key of the `Call` in the ASGI scope."""


class WorkBudget:
    """Tokens of prompts and possible answers that are decoded or wait, used from the event loop alone.

    Args:
        limit: the most of them together.
    """

    def __init__(self, limit: int):
        self.limit, self.reserved = limit, 0

    def reserve(self, tokens: int, retry_after: int) -> None:
        """Reserve the tokens of one prompt and its answer.

        Raises:
            ApiError: 400 if they never fit; 429 if they do not fit now.
        """
        if tokens > self.limit:
            raise ApiError(f"{tokens} tokens of prompt and answer are more than this server takes, {self.limit}")
        if self.reserved + tokens > self.limit:
            held = f"{self.reserved} tokens are being answered or wait, and {tokens} more are beyond {self.limit}"
            raise ApiError(f"{held}; try again", 429, retry_after=retry_after)
        self.reserved += tokens


class Call:
    """One HTTP request: its prompts in the batch and its share of the budget. It ends when the client leaves."""

    def __init__(self, engine: Engine, budget: WorkBudget):
        self.engine, self.budget = engine, budget
        self.tickets: list[Ticket] = []
        self.ended = False
        self._reserved = 0

    def reserve(self, tokens: int) -> None:
        """Reserve tokens of work until the end. Raises ApiError where they do not fit."""
        self.budget.reserve(tokens, self.engine.retry_after())
        self._reserved += tokens

    def submit(self, prompt: Any, **arguments: Any) -> Ticket:
        """Give a prompt to the engine; see `Engine.submit`."""
        ticket = self.engine.submit(prompt, **arguments)
        self.tickets.append(ticket)
        if self.ended:
            self.engine.cancel(ticket)
        return ticket

    def end(self) -> None:
        """Cancel unfinished prompts and give the tokens back."""
        self.ended = True
        self.budget.reserved -= self._reserved
        self._reserved = 0
        for ticket in self.tickets:
            self.engine.cancel(ticket)


class Limits:
    """An ASGI middleware. It gives every POST request a `Call`, in the scope's `CALL`.

    Args:
        app: the application behind it.
        api_key: the key in "Authorization: Bearer ..."; None lets everybody in.
        max_body: bytes of a request's body.
        max_requests: requests that are handled at once; more get 429 with Retry-After.
        max_work: tokens of prompts and possible answers at once.
        timeout: seconds in which a client must send the rest of its body, or take a piece of an answer.
    """

    def __init__(
        self,
        app: Any,
        *,
        engine: Engine,
        metrics: Metrics,
        api_key: str | None = None,
        max_body: int = 2**20,
        max_requests: int = 512,
        max_work: int = 2**20,
        timeout: float = 60.0,
    ):
        self.app, self.engine, self.metrics = app, engine, metrics
        self.api_key = None if api_key is None else api_key.encode()
        self.max_body, self.max_requests, self.timeout = max_body, max_requests, timeout
        self.budget, self.num_running = WorkBudget(max_work), 0

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
        except Exception:
            if not is_stuck:
                raise
            log.warning("a client did not read its answer for %s s", self.timeout)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        if not self._may_enter(scope):
            await self._refuse(receive, send, 401, "the API key is missing or wrong", {"www-authenticate": "Bearer"})
        elif scope["method"] != "POST":
            await self.app(scope, receive, send)
        elif self.num_running >= self.max_requests:
            headers = {"retry-after": str(self.engine.retry_after())}
            await self._refuse(
                receive, send, 429, f"{self.num_running} requests are being answered; try again", headers
            )
        else:
            self.num_running += 1
            try:
                await self._post(scope, receive, send)
            finally:
                self.num_running -= 1

    async def _post(self, scope: Any, receive: Any, send: Any) -> None:
        close = {"connection": "close"}
        try:
            body = await asyncio.wait_for(_read_body(receive, self.max_body), self.timeout)
        except TimeoutError:
            await _respond(send, 408, f"the body did not come within {self.timeout:g} s", close)
            return
        except ConnectionError:
            return
        if body is None:
            await _respond(send, 413, f"the body is longer than {self.max_body} bytes", close)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        call, has_left = Call(self.engine, self.budget), asyncio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left.set()
            call.end()

        async def replay() -> Any:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(watch())
        try:
            await self.app({**scope, CALL: call}, replay, send)
        finally:
            call.end()
            watcher.cancel()

    def _may_enter(self, scope: Any) -> bool:
        if self.api_key is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key)

    async def _refuse(self, receive: Any, send: Any, status: int, message: str, headers: dict[str, str]) -> None:
        try:
            await asyncio.wait_for(_read_body(receive, 0), self.timeout)
        except TimeoutError:
            headers["connection"] = "close"
        except ConnectionError:
            return
        await _respond(send, status, message, headers)


async def _read_body(receive: Any, limit: int) -> bytes | None:
    """Read the body of a request; None if it has more bytes than `limit`. Raises ConnectionError if the client left."""
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        length += len(message.get("body", b""))
        if length <= limit:
            parts.append(message.get("body", b""))
        if not message.get("more_body") or length > limit + MAX_DRAINED:
            return b"".join(parts) if length <= limit else None


async def _respond(send: Any, status: int, message: str, headers: dict[str, str]) -> None:
    body = json.dumps(error_body(status, message)).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
