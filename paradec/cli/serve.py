"""`paradec serve`: a model at OpenAI's endpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options, show
from paradec.cli.generate import Drafter
from paradec.core.checks import LARGEST_INT64, check_int, check_number
from paradec.core.text_files import read_text

Host = Annotated[str, typer.Option(help="Address to listen on; by default only this machine.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
BatchSize = Annotated[int, typer.Option("--batch", help="The most rows decoded together.")]
MaxMemory = Annotated[int | None, typer.Option(help="Bytes that keys and values may take; limits the rows.")]
PrefixMemory = Annotated[
    int | None,
    typer.Option(
        help="Bytes of keys and values that answered requests leave for those that begin alike; 0 keeps nothing. "
        "By default a quarter of what the rows take."
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the model for clients; by default that of --model.")]
Presets = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help='What `paradec tune` or `Request.save` wrote: NAME.json is {"preset": "NAME"} of a body.'
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the API key that clients must send; PARADEC_API_KEY can hold it instead."
    ),
]
MaxAnswer = Annotated[int, typer.Option(help="The most tokens of an answer.")]
MaxBody = Annotated[int, typer.Option(help="The most bytes of a request.")]
MaxRequests = Annotated[int, typer.Option(help="Requests answered or waiting at once; more get 429.")]
MaxWork = Annotated[
    int,
    typer.Option(help="Tokens of prompts and answers, asked for or being answered at once; more get 429."),
]
Timeout = Annotated[float, typer.Option(help="Seconds for a client to send a body or take a piece of an answer.")]
LOCAL = ("127.0.0.1", "localhost", "::1")
KEY = "PARADEC_API_KEY"


@options.takes("model sampler set_ preset cache suffix max_new_tokens temperature dtype device")
def serve(
    context: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    batch: BatchSize = 8,
    max_memory: MaxMemory = None,
    prefix_memory: PrefixMemory = None,
    presets: Presets = None,
    drafter: Drafter = None,
    api_key_file: KeyFile = None,
    max_answer: MaxAnswer = 4096,
    max_body: MaxBody = 2**20,
    max_requests: MaxRequests = 512,
    max_work: MaxWork = 2**20,
    timeout: Timeout = 60.0,
    **shared: Any,
) -> None:
    """Serve a model at /v1/chat/completions, /v1/completions and /v1/systemone, with batches that stay full."""
    check_int("--port", port, low=0, high=65535)
    check_int("--batch", batch, low=1)
    check_int("--max-memory", max_memory, low=1, high=LARGEST_INT64, none=True)
    check_int("--prefix-memory", prefix_memory, low=0, high=LARGEST_INT64, none=True)
    limits: dict[str, Any] = {"max_answer": max_answer, "max_body": max_body, "max_requests": max_requests}
    limits["max_work"] = max_work
    for limit, value in limits.items():
        check_int(f"--{limit.replace('_', '-')}", value, low=1)
    check_number("--timeout", timeout, low=0, open_low=True)
    key = read_key(api_key_file)
    from paradec.integrations.server import check_installed, listen

    check_installed()
    if key is None and host not in LOCAL:
        print(f"warning: --host {host} without an API key: whoever reaches it may use it", file=sys.stderr)
    listening = listen(host, port)  # before the model is loaded, which may take minutes
    from paradec.cli.work import prepare
    from paradec.integrations.server.asked import read_presets

    offered = read_presets(presets)
    work = prepare("generate", None, given=options.given(context), drafter=drafter, **shared)
    request = {name: value for name, value in work.request.items() if name not in ("seed", "attention")}
    with show.waiting("starting"):
        import paradec.integrations.server.app as app
        from paradec.integrations.server.engine import Engine

        check_served(work.model, max_memory, sampler=work.method, **request)
        rows: dict[str, Any] = {"batch_size": batch, "max_memory": max_memory, "prefix_memory": prefix_memory}
        engine = Engine(work.model, **rows, sampler=work.method, **request)
    called = name or shared["model"] or "packaged"
    try:
        built = app.build_app(engine, name=called, presets=offered, api_key=key, timeout=timeout, **limits)
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"{called}: http://{shown}:{listening.getsockname()[1]}/v1")
        sys.stdout.flush()
        with listening:
            app.serve(built, listening)
    finally:
        engine.close()


def check_served(model: Any, max_memory: int | None, **request: Any) -> None:
    """Raise the ValueError or TypeError with which prompts would end that say nothing themselves, if there is one."""
    from paradec.batching.batch import Batch

    with Batch(model, batch_size=1, max_memory=max_memory, **request) as batch:
        ticket = batch.add([0 if model.facts.hole_id != 0 else 1])
        batch.step()
    error = None if ticket.output is None else ticket.output.error
    if isinstance(error, (ValueError, TypeError)):
        raise error


def read_key(file: Path | None) -> str | None:
    """The API key of a file, or of the environment; None where there is none.

    Raises:
        ValueError, OSError: a file without a key.
    """
    if file is None:
        return os.environ.get(KEY) or None
    options.check_readable("--api-key-file", file)
    key = read_text(file).strip()
    if not key or any(sign.isspace() for sign in key):
        raise ValueError(f"--api-key-file {str(file)!r} must hold one key")
    return key
