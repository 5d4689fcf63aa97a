"""`paradec compare`: right answers beside forwards, sampler by sampler (`paradec.tools.evaluation.compare`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show, tables
from paradec.cli.constraints import Choices, Pattern, Schema, constraint
from paradec.core.checks import check_choice, check_int
from paradec.core.interrupts import EXIT_CODE, raise_again

Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Your own prompts, one JSON object a line: {"prompt": ..., "answer": ...}, or "regex" for "answer"; '
        'optionally "task" and "constraint". By default the packaged ones.',
    ),
]
Tasks = Annotated[list[str] | None, typer.Option(help="Tasks, separated by commas; by default all.")]
Limit = Annotated[int | None, typer.Option(help="Prompts of each task; by default all.")]
Samplers = Annotated[
    list[str] | None,
    typer.Option(
        help="Samplers, separated by commas, combinations ('credit+localleap'), and samplers of your own "
        "(FILE.py:NAME); by default every masked one."
    ),
]
Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        help="A name that `paradec caches` lists, or a cache of your own (FILE.py:NAME); settings go in parentheses: "
        "'dkv_decode(refresh_interval=4)'.",
    ),
]
Defaults = Annotated[bool, typer.Option("--defaults", help="Only the defaults of every sampler: one row for each.")]
Format = Annotated[
    str | None, typer.Option("--format", help="Print the table as markdown, latex (with booktabs) or csv.")
]
Seed = Annotated[int, typer.Option(help="Seed of the random draws.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write each result when it is measured.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Draw accuracy over tokens per forward (needs matplotlib).")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the results in --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON, not as a table.")]


@options.takes("model suffix attention attention_set batch max_new_tokens block_length dtype device")
def compare(
    prompts: Prompts = None,
    tasks: Tasks = None,
    limit: Limit = None,
    samplers: Samplers = None,
    cache: Cache = "none",
    choice: Choices = None,
    regex: Pattern = None,
    json_schema: Schema = None,
    defaults: Defaults = False,
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    resume: Resume = False,
    as_json: AsJson = False,
    format_: Format = None,
    **shared: Any,
) -> None:
    """Compare samplers, each with several settings, by right answers and forwards."""
    check_files(out, plot, resume)
    check_format(format_, as_json)
    options.check_readable("--prompts", prompts)

    from paradec.tools import evaluation

    # Everything is checked before the model is loaded, which may take minutes.
    names = options.sampler_names(samplers)
    evaluation.configurations(names, defaults)
    shared["cache"] = options.own_name("--cache", cache, "cache")
    paradec.caches.create(shared["cache"])
    shared["attention"] = options.attention_of(shared["attention"], shared.pop("attention_set"))
    shared["suffix"] = paradec.Suffix.of(shared["suffix"])
    shared |= constraint(choice, regex, json_schema)
    check_int("batch", shared["batch"], low=1)
    check_int("seed", seed, low=0, high=2**63 - 1)
    for name in ("max_new_tokens", "block_length"):
        check_int(name, shared[name], low=1, none=True)
    if prompts is None:
        questions = evaluation.packaged_questions(options.names(tasks), limit)
    else:
        questions = evaluation.read_questions(prompts, options.names(tasks), limit)
    earlier = evaluation.Comparison.from_json(out) if resume and out is not None and out.exists() else None
    loaded = options.load(shared)
    asked = {"questions": questions, "names": names, "defaults": defaults}
    found, code = measure(loaded, out, **asked, resume=earlier, seed=seed, **shared)
    tell(found, code, out, plot, as_json, format_)
    raise typer.Exit(code)


def check_files(out: Path | None, plot: Path | None, resume: bool) -> None:
    """Raise ValueError unless a comparison can be written where it is to go."""
    options.check_writable("--out", out)
    options.check_writable("--plot", plot)
    if resume and out is None:
        raise ValueError("--resume goes on with the results in --out FILE.json; give it")
    if plot is not None:
        from paradec.tools.evaluation.plot import check_plot

        check_plot(plot)


def check_format(format_: str | None, as_json: bool) -> None:
    """Raise ValueError for a format of a table that there is not, or one beside --json."""
    from paradec.tools.evaluation.written import FORMATS

    if format_ is not None:
        check_choice("--format", format_, FORMATS)
        if as_json:
            raise ValueError(f"--json and --format {format_} are two ways to print the results; give one")


def tell(found: Any, code: int, out: Path | None, plot: Path | None, as_json: bool, format_: str | None = None) -> None:
    """Write a `Comparison` to its files and print it; `code` is the exit code, of an interrupted one not 0."""
    if out is not None and found.results:
        found.to_json(out)
    if plot is not None and found.results:
        from paradec.tools.evaluation.plot import frontier

        frontier(found, plot)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        return
    if format_ is None:
        tables.comparison(found.columns(), found.table())
    else:
        from paradec.tools.evaluation.written import FORMATS

        typer.echo(FORMATS[format_](found.columns(), found.table()))
    tell_padding(found)
    if code:
        print("interrupted: the configurations that were not finished are missing", file=sys.stderr)


def tell_padding(found: Any) -> None:
    """Say, beside the results, which rows spent their forwards on padding."""
    from paradec.tools.evaluation.padding import padding_lines

    for line in padding_lines(found.results):
        print(line, file=sys.stderr)


def measure(model: Any, out: Path | None, **request: Any) -> tuple[Any, int]:
    """Run `paradec.tools.evaluation.compare` as `measured` does."""
    from paradec.tools import evaluation

    return measured(evaluation.compare, model, out, **request)


def measured(run: Callable[..., Any], model: Any, out: Path | None, **request: Any) -> tuple[Any, int]:
    """Run a comparison with a progress bar.

    Args:
        run: the function, of which a comparison comes. out: written after every configuration. request: its arguments.

    Returns:
        The `Comparison`, of an interrupted one what was finished, and the exit code.
    """
    bar, saved = show.Bar(), 0

    def update(comparison: Any, configuration: Any, share: float) -> None:
        nonlocal saved
        if out is not None and len(comparison.results) > saved:
            comparison.to_json(out)
            saved = len(comparison.results)
        bar.work(configuration.name, share, comparison.asked, comparison.to_ask)

    raise_again()
    try:
        with bar:
            return run(model, **request, progress=update), 0
    except paradec.Interrupted as interrupt:
        return interrupt.output, EXIT_CODE
