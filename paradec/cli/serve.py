"""`paradec serve`: serve a model at OpenAI's endpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options, show
from paradec.core.checks import check_choice, check_number
from paradec.core.text_files import read_text

MEMORY = typer.Option(metavar="BYTES", help="Limit for keys and values (2GB, 512MiB), and so for the number of rows.")
PREFIXES = "Limit for keys and values that requests with equal prefixes reuse; by default a quarter of the rows' bytes."
PRESETS = typer.Option(metavar="FOLDER", help='Saved requests: {"preset": "NAME"} in a body selects NAME.json.')
KEY_FILE = options.existing_file("File with the API key that clients must send; PARADEC_API_KEY can hold it instead.")
CACHE = "As in `generate`; with --model by default dual (approximate) on bidirectional models, else block (exact)."
ANSWER = "Maximum number of tokens in an answer; a body without max_tokens gets the model's default."
LOCAL = ("127.0.0.1", "localhost", "::1")


@options.include(
    "model sampler set_ preset suffix max_new_tokens temperature drafter tokenizer dtype quantization device"
)
def serve(
    context: typer.Context,
    host: str = typer.Option("127.0.0.1", help="Address to listen on; by default only this machine."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port; 0 selects a free one."),
    name: str | None = typer.Option(None, help="The model's name for clients; by default --model's."),
    batch: int = typer.Option(8, "--batch", min=1, help="Maximum number of rows decoded together."),
    max_memory: Annotated[str | None, MEMORY] = None,
    prefix_memory: str | None = typer.Option(None, metavar="BYTES", help=PREFIXES),
    presets: Annotated[Path | None, PRESETS] = None,
    api_key_file: Annotated[Path | None, KEY_FILE] = None,
    max_answer: int = typer.Option(4096, min=1, help=ANSWER),
    max_body: int = typer.Option(2**20, min=1, help="Maximum number of bytes in a request."),
    max_requests: int = typer.Option(512, min=1, help="Requests answered or waiting at once; more get 429."),
    max_work: int = typer.Option(2**20, min=1, help="Tokens of prompts and answers at once; more get 429."),
    timeout: float = typer.Option(60.0, help="Seconds for a client to send a body or take a piece of an answer."),
    log_level: str = typer.Option("warning", help="Level of the log; info writes a line per request."),
    cors: bool = typer.Option(False, "--cors", help="Let pages of any origin call the server from a browser."),
    cache: str | None = typer.Option(None, help=CACHE),
    **shared: Any,
) -> None:
    """Serve a model at /v1/chat/completions, /v1/completions and /v1/systemone, with batches that stay full."""
    check_choice("--log-level", log_level, ("critical", "error", "warning", "info", "debug"))
    check_number("--timeout", timeout, low=0, open_low=True)
    api_key = os.environ.get("PARADEC_API_KEY") or None
    if api_key_file is not None:
        api_key = read_text(api_key_file).strip()
        if not api_key or any(char.isspace() for char in api_key):
            raise ValueError(f"--api-key-file {str(api_key_file)!r} must hold one key")
    from paradec.integrations.server import check_installed, listen

    check_installed()
    if api_key is None and host not in LOCAL:
        print(f"warning: --host {host} without an API key: anyone who can reach it can use it", file=sys.stderr)
    listen_socket = listen(host, port)  # before the model is loaded, which may take minutes
    from paradec.cli.work import prepare
    from paradec.integrations.server.request_body import read_presets

    saved_requests = read_presets(presets) if presets else {}
    shared["cache"] = cache or "none"
    given_options, has_model = options.explicit_options(context), shared["model"] is not None
    work = prepare("generate", None, given_options, use_defaults=has_model, **shared)
    request = {name: value for name, value in work.request.items() if name not in ("seed", "attention")}
    with show.waiting("starting"):
        import paradec.integrations.server.app as app
        from paradec.api.defaults import choose_packaged_suffix, describe_settings
        from paradec.integrations.server.engine import Engine

        if not has_model and not given_options & {"suffix", "preset"}:
            request["suffix"] = choose_packaged_suffix(work.model, work.method, request["cache"])
        try_request(work.model, max_memory, sampler=work.method, **request)
        sizes: dict[str, Any] = {"batch_size": batch, "max_memory": max_memory, "prefix_memory": prefix_memory}
        engine = Engine(work.model, **sizes, sampler=work.method, **request)
    model_name = name or shared["model"] or "packaged"
    limits: dict[str, Any] = {"max_answer": max_answer, "max_body": max_body, "max_requests": max_requests}
    limits |= {"max_work": max_work, "timeout": timeout, "cors": cors}
    try:
        server_app = app.build_app(engine, name=model_name, presets=saved_requests, api_key=api_key, **limits)
        displayed_host = f"[{host}]" if ":" in host else host
        typer.echo(f"{model_name}: http://{displayed_host}:{listen_socket.getsockname()[1]}/v1")
        typer.echo(describe_in_line(describe_settings(engine.batch, max_answer)))
        sys.stdout.flush()
        with listen_socket:
            app.serve(server_app, listen_socket, log_level)
    finally:
        engine.close()


def describe_in_line(settings: dict[str, Any]) -> str:
    """Write the settings of `describe_settings` as one line."""
    approximate = " (approximate)" * settings["is_approximate"]
    parts = [f"sampler {settings['sampler']}", f"cache {settings['cache']}{approximate}"]
    parts += [f"blocks of {settings['block_length']}"] if settings["block_length"] else []
    parts += [f"suffix {settings['suffix']['window']}"] if settings["suffix"] else []
    answers = f"answers of {settings['max_new_tokens']} tokens by default, at most {settings['max_answer']}"
    if settings["max_length"]:
        answers += f" (prompt and answer together at most {settings['max_length']})"
    return ", ".join((*parts, settings["dtype"], answers))


def try_request(model: Any, max_memory: int | str | None, **request: Any) -> None:
    """Decode a short prompt with the server's arguments, and raise its ValueError or TypeError, if any."""
    from paradec.batching.batch import Batch

    with Batch(model, batch_size=1, max_memory=max_memory, **request) as batch:
        ticket = batch.add([0 if model.facts.hole_id != 0 else 1])
        batch.step()
    if isinstance(error := getattr(ticket.output, "error", None), (ValueError, TypeError)):
        raise error
