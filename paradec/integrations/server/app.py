"""The ASGI application and its server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from paradec.api.defaults import describe_settings
from paradec.batching.slots import BatchClosed
from paradec.core.checks import check_int, check_number
from paradec.integrations.server.answers import Decisions, Service
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import CALL, Limits
from paradec.integrations.server.request_body import OWN, ChatBody, DecisionBody, TextBody

GRACE = 10  # seconds for open requests when the server stops


def build_app(
    engine: Engine,
    *,
    name: str,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    api_key: str | None = None,
    max_answer: int = 4096,
    max_body: int = 2**20,
    max_requests: int = 512,
    max_work: int = 2**20,
    timeout: float = 60.0,
    cors: bool = False,
) -> FastAPI:
    """Build an ASGI application with the paths of docs/serving.md. Its shutdown closes the engine.

    Args:
        name: the model's name for clients.
        presets: by name, fields of `paradec.Request` (`request_body.read_presets`), for the body's field "preset".
        max_answer: maximum `max_tokens` of a request.
        api_key, max_body, max_requests, max_work, timeout: see `Limits`.
        cors: whether web pages of any origin may read the answers.

    Raises ValueError for an argument out of its range, or a model without a fast tokenizer."""
    bounds: dict[str, Any] = {"max_body": max_body, "max_requests": max_requests, "max_work": max_work}
    for argument, value in {"max_answer": max_answer, **bounds}.items():
        check_int(argument, value, low=1)
    check_number("timeout", timeout, low=0, open_low=True)
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key is empty; give a key, or None")
    if not hasattr(engine.model.tokenizer, "_tokenizer"):
        raise ValueError(f"{engine.model.facts.name} has no fast tokenizer for streaming; load(..., tokenizer=...)")
    service, decisions = Service(engine, name, presets or {}, max_answer), Decisions(engine)
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "paradec"}
    entry[OWN] = describe_settings(engine.batch, max_answer)

    async def reraise(_: Request, error: Exception) -> NoReturn:
        raise error  # `Limits` builds the response

    handlers: Any = {RequestValidationError: reraise, HTTPException: reraise}
    app = FastAPI(on_shutdown=[engine.close, service.compiler.close], openapi_url=None, exception_handlers=handlers)

    @app.post("/v1/chat/completions")
    async def create_chat(request: Request, body: ChatBody) -> Response:
        return await service.respond(request.scope[CALL], body)

    @app.post("/v1/completions")
    async def create_text(request: Request, body: TextBody) -> Response:
        return await service.respond(request.scope[CALL], body)

    @app.post("/v1/systemone")
    async def decide(request: Request, body: DecisionBody) -> dict[str, Any]:
        service.check_name(body.model)
        return {"model": name, **await decisions.answer(request.scope[CALL], body)}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{model:path}")
    async def show_model(model: str) -> dict[str, Any]:
        service.check_name(model)
        return entry

    @app.get("/health")
    async def show_health() -> dict[str, str]:
        engine.batch.check_open()
        return {"status": "ok"}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.state.engine = engine
    app.add_middleware(Limits, engine=engine, api_key=api_key, timeout=timeout, **bounds)
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return app


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: Any = None) -> None:
        """Stop; requests that are still open after `GRACE` seconds end with an error for their clients."""
        app: Any = self.config.app
        loop, error = asyncio.get_running_loop(), BatchClosed("the server is stopping")
        loop.call_later(GRACE, loop.run_in_executor, None, app.state.engine.batch.close, error)
        await super().shutdown(sockets)


def serve(app: FastAPI, listening: socket.socket, log_level: str = "warning") -> None:
    """Serve on a socket of `listen` until Ctrl-C or SIGTERM. Open requests then have `GRACE` more seconds."""
    _Server(uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=GRACE + 5)).run(sockets=[listening])
