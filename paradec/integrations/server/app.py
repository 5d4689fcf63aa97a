"""The application, and a server that runs it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBWorkerDeadError

from paradec.core.checks import check_int, check_number
from paradec.integrations.server.asked import Refused
from paradec.integrations.server.decisions import SystemOne
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.gate import PATHS, Gate, error_body
from paradec.integrations.server.handlers import Chat, Completions
from paradec.integrations.server.hosts import Models, State
from paradec.integrations.server.index import HEADERS, index
from paradec.integrations.server.metrics import Metrics
from paradec.integrations.server.work import Work

NOISY = ("transformers.cli.serving.chat_completion", "transformers.cli.serving.completion")
"""Loggers that write a warning for every request."""


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
) -> FastAPI:
    """An ASGI application with the paths `gate.PATHS`. When it shuts down it closes the engine.

    Args:
        engine: what decodes; its model has a tokenizer of the fast kind.
        name: what clients call the model.
        presets: fields of a request by name (`asked.read_presets`), for the body's field "preset".
        max_answer: tokens that a client may ask for.
        max_work: tokens of prompts, and of what answers may have, that are answered or wait at once; more get 429.
        api_key, max_body, max_requests, timeout: as for `Gate`.

    Raises:
        ValueError: an argument out of its range, or a model without such a tokenizer.
    """
    check_int("max_answer", max_answer, low=1)
    check_int("max_body", max_body, low=1)
    check_int("max_requests", max_requests, low=1)
    check_int("max_work", max_work, low=1)
    check_number("timeout", timeout, low=0, open_low=True)
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key is empty; give a key, or None")
    tokenizer = engine.model.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "_tokenizer"):
        raise ValueError(f"{engine.model.facts.name} has no tokenizer of the fast kind, which streams of text need")
    for logger in NOISY:
        logging.getLogger(logger).setLevel(logging.ERROR)
    metrics = Metrics(engine)
    models, state = Models(engine, name), State(engine, metrics, max_answer, Work(max_work))
    chat, completions = Chat(models, state, presets or {}), Completions(models, state, presets or {})
    app = build_server(models, chat, completions, None, None, SystemOne(models, state), state)
    # the others load models of a client's choice, unload ours, or are not ours to answer
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in PATHS]

    @app.get("/")
    async def show_index(request: Request) -> HTMLResponse:
        return HTMLResponse(index(name, str(request.base_url).rstrip("/"), api_key is not None), headers=HEADERS)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        wait = None if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return JSONResponse(error_body(error.status, str(error), error.param), error.status, wait)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(CBWorkerDeadError)
    async def stopped(_: Request, error: CBWorkerDeadError) -> JSONResponse:
        return JSONResponse(error_body(503, str(error)), 503, {"retry-after": "5"})

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        if any(found.get("type") == "json_invalid" for found in error.errors()):
            return JSONResponse(error_body(400, "the body is no JSON"), 400)
        return JSONResponse(error_body(422, "the body must be a JSON object (content-type application/json)"), 422)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, f"{type(error).__name__} in the server"), 500)

    app.add_middleware(
        Gate,
        engine=engine,
        metrics=metrics,
        api_key=api_key,
        max_body=max_body,
        max_requests=max_requests,
        timeout=timeout,
    )
    return app


def serve(app: FastAPI, listening: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM; requests that are being answered have ten seconds then.

    Args:
        app: from `build_app`. listening: from `paradec.integrations.server.listen`.
    """
    uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=10, lifespan="on")
    ).run(sockets=[listening])
