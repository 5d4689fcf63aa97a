"""What comes before the endpoints: keys, sizes, how many at once, and clients that go away or do not read."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from typing import Any

from paradec.integrations.server.engine import Engine
from paradec.integrations.server.hosts import CALL, HttpCall
from paradec.integrations.server.metrics import Metrics

log = logging.getLogger(__name__)
OPEN = ("/", "/health")
"""Paths that need no key."""
DRAINED = 64 * 2**20
"""Bytes of a body that are read and thrown away, so that a client that is still sending sees why it was refused."""


class Gate:
    """An ASGI middleware.

    Args:
        app: the application that it guards.
        api_key: what clients send as "Authorization: Bearer ..."; None lets all in.
        max_body: bytes of a request's body.
        max_requests: requests that are handled at once; more get 429 with Retry-After.
        timeout: seconds that a client may take to send the rest of its body, or to take a piece of an answer.
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
        timeout: float = 60.0,
    ):
        self.app, self.engine, self.metrics = app, engine, metrics
        self.api_key = None if api_key is None else api_key.encode()
        self.max_body, self.max_requests, self.timeout = max_body, max_requests, timeout
        self.running = 0
        """Requests with a body that are being handled."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # nobody was there to take an answer
        stuck = False

        async def sending(message: Any) -> None:
            nonlocal status, stuck
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                await asyncio.wait_for(send(message), self.timeout)
            except TimeoutError:
                stuck = True
                raise

        try:
            await self._handle(scope, receive, sending)
        except Exception:
            if not stuck:
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
        elif self.running >= self.max_requests:
            wait = {"retry-after": str(self.engine.retry_after())}
            await self._refuse(receive, send, 429, f"{self.running} requests are being answered; try again", wait)
        else:
            self.running += 1
            try:
                await self._post(scope, receive, send)
            finally:
                self.running -= 1

    async def _post(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await asyncio.wait_for(_read(receive, self.max_body), self.timeout)
        except TimeoutError:
            await _answer(send, 408, f"the body did not come within {self.timeout:g} s", {"connection": "close"})
            return
        except ConnectionError:
            return
        if body is None:
            await _answer(send, 413, f"the body is longer than {self.max_body} bytes", {"connection": "close"})
            return
        call, gone, sent = HttpCall(self.engine), asyncio.Event(), False

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            call.end()

        async def replay() -> Any:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(watch())
        token = CALL.set(call)
        try:
            await self.app(scope, replay, send)
        finally:
            CALL.reset(token)
            call.end()
            watcher.cancel()

    def _may_enter(self, scope: Any) -> bool:
        if self.api_key is None or scope["path"] in OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key)

    async def _refuse(self, receive: Any, send: Any, status: int, message: str, headers: dict[str, str]) -> None:
        try:
            await asyncio.wait_for(_read(receive, 0), self.timeout)
        except TimeoutError:
            headers["connection"] = "close"
        except ConnectionError:
            return
        await _answer(send, status, message, headers)


PATHS = ("/", "/v1/chat/completions", "/v1/completions", "/v1/systemone", "/v1/models", "/health", "/metrics")
"""What is served."""


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


async def _read(receive: Any, most: int) -> bytes | None:
    """The body of a request; None if it is longer than `most`, which is read on for a while then.

    Raises:
        ConnectionError: the client has gone.
    """
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        length += len(message.get("body", b""))
        if length <= most:
            parts.append(message.get("body", b""))
        if not message.get("more_body") or length > most + DRAINED:
            return b"".join(parts) if length <= most else None


async def _answer(send: Any, status: int, message: str, headers: dict[str, str]) -> None:
    body = json.dumps(error_body(status, message)).encode()
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
