"""The command line: `paradec generate`, `paradec samplers`, `paradec caches`.

A wrong argument gives one line on standard error and exit code 2. With `PARADEC_DEBUG=1` in the environment the
traceback is shown instead.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# What paradec, and the libraries that it calls, raise for input that they cannot use.
_INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


class _OneLineErrors(TyperGroup):
    """A command group that reports every wrong argument, its own or the library's, in one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode or os.environ.get("PARADEC_DEBUG", "0") not in ("", "0"):
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            try:
                # The exit code of a typer.Exit, or what the command returned.
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            except typer.Abort:
                code = 130
            except Exception as error:
                code = _fail(error)
        sys.exit(code if isinstance(code, int) else 0)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print("warning: " + " ".join(str(message).split()), file=sys.stderr)


def _fail(error: Exception) -> int:
    # Some releases of typer use click's exceptions and some a copy of them: ask for the method, not for the class.
    if hasattr(error, "format_message"):
        text = error.format_message()
    elif isinstance(error, _INPUT_ERRORS):
        text = str(error) or type(error).__name__
    else:
        raise error
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return 2


app = typer.Typer(
    name="paradec",
    cls=_OneLineErrors,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Decode with masked-diffusion language models, several tokens per forward.",
)


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        import paradec

        typer.echo(f"paradec {paradec.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    model: Annotated[
        str | None, typer.Option(help="A folder or a hub id; by default the small model inside the package.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="A name that `paradec samplers` lists.")] = "threshold",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the sampler; may be repeated."),
    ] = None,
    cache: Annotated[str, typer.Option(help="A name that `paradec caches` lists.")] = "none",
    block_length: Annotated[int | None, typer.Option(help="Tokens per block; by default the model's own.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, for samplers that follow a schedule.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length of the canvas after the prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")] = None,
    guidance_scale: Annotated[float, typer.Option(help="Classifier-free guidance; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.")] = None,
    eos_early_stop: Annotated[bool, typer.Option(help="Stop when the text before an end token is final.")] = True,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write what each step evaluated and made final.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt without the chat template.")] = False,
) -> None:
    """Answer a prompt, and say what it took."""
    if prompt == "-":
        prompt = sys.stdin.read().rstrip("\r\n")
    settings = _settings(set_ or [])
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        raise ValueError(f"cannot write the trace to {str(trace)!r}: not a file in an existing folder")

    import paradec

    # Settings are checked before the model is loaded, which may take minutes.
    method = paradec.samplers.create(sampler, **settings)
    paradec.caches.create(cache)
    _quiet_loading()
    loaded = paradec.load(model, dtype=dtype, device=device)

    bar = _Bar()
    code = 0
    try:
        with bar:
            output = paradec.generate(
                loaded,
                prompt,
                sampler=method,
                cache=cache,
                block_length=block_length,
                steps=steps,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                guidance_scale=guidance_scale,
                seed=seed,
                eos_early_stop=eos_early_stop,
                trace=trace is not None,
                chat=False if raw else None,
                callback=bar.update,
            )
    except paradec.Interrupted as interrupt:
        code = 130
        output = interrupt.output
        if output is None:
            raise typer.Exit(code) from None

    if trace is not None and output.trace is not None:
        output.trace.to_json(trace)
    if as_json:
        typer.echo(json.dumps(_report(output, method, cache, interrupted=code != 0), ensure_ascii=False))
    else:
        typer.echo(output.text)
        typer.echo(
            f"{_count(output.tokens[0], 'token')}, {_count(output.nfe, 'forward')}, "
            f"{output.tokens_per_forward:.1f} tokens per forward, {output.seconds:.2f} s"
            + (", interrupted" if code else "")
        )
    raise typer.Exit(code)


@app.command()
def samplers(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the samplers and their settings."""
    import paradec

    _list(paradec.samplers, as_json)


@app.command()
def caches(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the caches and their settings."""
    import paradec

    _list(paradec.caches, as_json)


def _list(registry: Any, as_json: bool) -> None:
    """Print a registry: a table on a terminal, tab-separated lines elsewhere."""
    from paradec.protocol import plain

    entries = []
    for name in registry.names():
        cls = registry.get(name)
        entry: dict[str, Any] = {"name": name}
        entry |= {key: getattr(cls, key, "") for key in ("family", "summary", "paper", "arxiv")}
        entry["settings"] = {key: plain(value) for key, value in cls.settings().items()}
        entries.append(entry)
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return

    columns = ("name", "family", "settings", "paper")
    rows = [
        (
            entry["name"],
            entry["family"],
            ", ".join(f"{key}={value}" for key, value in entry["settings"].items()) or "-",
            entry["paper"] + (f" (arXiv:{entry['arxiv']})" if entry["arxiv"] else "") or "-",
        )
        for entry in entries
    ]
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


class _Bar:
    """A progress bar on standard error, on a terminal only, that appears once the work has lasted a second."""

    delay = 1.0
    interval = 0.1

    def __init__(self) -> None:
        # TERM=dumb cannot redraw a line.
        self.enabled = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.progress: Any = None
        self.task: Any = None
        self.due = time.monotonic() + self.delay

    def __enter__(self) -> _Bar:
        self.due = time.monotonic() + self.delay
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def update(self, state: Any, commit: Any) -> None:
        """Called by `paradec.generate` after every commit."""
        now = time.monotonic()
        if not self.enabled or now < self.due:
            return
        self.due = now + self.interval
        decided, total = state.progress
        if self.progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.progress.add_task("decoding", total=total)
            self.progress.start()
        self.progress.update(self.task, completed=decided, total=total)


def _settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Read `name=value` pairs."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set takes NAME=VALUE, got {pair!r}")
        if name in settings:
            raise ValueError(f"--set gives {name!r} twice")
        settings[name] = _value(text.strip())
    return settings


def _value(text: str) -> Any:
    """A JSON or Python literal (0.9, true, None, [1, 2]), otherwise the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _quiet_loading() -> None:
    """Keep the libraries' own progress bars and advice out of logs and pipes; a terminal still shows downloads."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # a hub out of reach would be reported at each of its retries
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()


def _report(output: Any, sampler: Any, cache: str, interrupted: bool) -> dict[str, Any]:
    new_tokens = output.new_tokens[0].tolist()
    return {
        "text": output.text,
        # without the padding after the end token
        "new_tokens": new_tokens[: output.tokens[0]] if output.finished[0] else new_tokens,
        "tokens": output.tokens[0],
        "finished": output.finished[0],
        "nfe": output.nfe,
        "row_forwards": output.row_forwards,
        "forwarded_tokens": output.forwarded_tokens,
        "tokens_per_forward": output.tokens_per_forward,
        "seconds": output.seconds,
        "sampler": sampler.to_dict(),
        "cache": cache,
        "interrupted": interrupted,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
