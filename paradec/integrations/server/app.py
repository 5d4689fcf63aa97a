"""The application, and a server that runs it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from html import escape
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
from paradec.integrations.server.hosts import Models, State, Work
from paradec.integrations.server.metrics import Metrics

NOISY = ("transformers.cli.serving.chat_completion", "transformers.cli.serving.completion")
"""Loggers that write a warning for every request."""
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; border: 1px solid #8888; padding: .75rem }}
td {{ padding: 0 1rem .25rem 0; vertical-align: top }}
</style>
<h1>{title}</h1>
<p>{said} OpenAI's clients take the base URL <code>{base}/v1</code>.</p>
<table>
<tr><td><code>POST /v1/chat/completions</code><td>a chat, through the model's chat template
<tr><td><code>POST /v1/completions</code><td>text as it is
<tr><td><code>POST /v1/systemone</code><td>questions about a text, answered with probabilities
<tr><td><a href="v1/models"><code>GET /v1/models</code></a><td>the model that is served
<tr><td><a href="health"><code>GET /health</code></a><td>200, or 503 once nothing is decoded any more
<tr><td><a href="metrics"><code>GET /metrics</code></a><td>counts and times, for Prometheus
</table>
<h2>Ask</h2>
<pre>curl {base}/v1/chat/completions \\
  -H "Content-Type: application/json" \\{key}
  -d '{{"messages": [{{"role": "user", "content": "Sort: pear fig apple"}}]}}'</pre>
<p>A body may also say <code>"paradec": {{"sampler": "credit", "cache": "dual"}}</code>: fields of
<code>paradec.Request</code>.</p>
</html>
"""


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
        return HTMLResponse(build_page(name, str(request.base_url).rstrip("/"), api_key is not None), headers=HEADERS)

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


def build_page(name: str, base: str, keyed: bool) -> str:
    """The page at `/`: what is served, and how to ask. HTML without a script, and without anything from elsewhere.

    Args:
        name: what clients call the model; not said where a key is asked for. base: the server's address, without "/" at
            its end. keyed: whether a key is asked for.
    """
    key = '\n  -H "Authorization: Bearer $KEY" \\' if keyed else ""
    said = "Requests need an API key." if keyed else f"The model is <code>{escape(name)}</code>."
    return PAGE.format(title="paradec", said=said, base=escape(base), key=key)
