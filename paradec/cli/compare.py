"""`paradec compare` and `paradec bench parallel`: right answers and forwards, sampler by sampler."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show, tables
from paradec.core.checks import check_choice, check_int
from paradec.core.interrupts import EXIT_CODE, raise_again

PROMPTS = options.existing_file(
    'Your prompts, a line {"prompt": ..., "answer": ...}, or "regex" for "answer"; optionally "task" and "constraint".'
)
SWEPT = typer.Option(help="Samplers, separated by commas; by default six rules for confidence and their baselines.")
Tasks = Annotated[list[str] | None, typer.Option(help="Tasks, separated by commas; by default all.")]
Format = Annotated[str | None, typer.Option("--format", help="Print the table as markdown, latex or csv.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write each result when it is measured.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw accuracy over tokens per forward.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the results in --out.")]


@options.takes("model suffix attention attention_set batch max_new_tokens block_length dtype device as_json")
def compare(
    prompts: Annotated[Path | None, PROMPTS] = None,
    tasks: Tasks = None,
    limit: options.Limit = None,
    samplers: options.Samplers = None,
    cache: str = typer.Option("none", help="A name that `paradec caches` lists (with settings), or FILE.py:CLASS."),
    choice: options.Choices = None,
    regex: options.Pattern = None,
    json_schema: options.Schema = None,
    defaults: bool = typer.Option(False, "--defaults", help="One row a sampler: its defaults."),
    seed: options.Seed = 0,
    out: Out = None,
    plot: Plot = None,
    resume: Resume = False,
    format_: Format = None,
    **shared: Any,
) -> None:
    """Compare samplers, each with several settings, by right answers and forwards."""
    as_json = shared.pop("as_json")
    check_output(out, plot, resume, format_, as_json)
    check_int("--max-new-tokens", shared["max_new_tokens"], low=1, none=True)

    from paradec.tools import evaluation

    # Everything is checked before the model is loaded, which may take minutes.
    names = options.sampler_names(samplers)
    evaluation.configurations(names, defaults)
    shared["cache"] = options.import_classes("--cache", cache, "cache")
    paradec.caches.create(shared["cache"])
    shared["attention"] = options.attention_of(shared["attention"], shared.pop("attention_set"))
    shared |= {"suffix": paradec.Suffix.of(shared["suffix"]), **options.constraint(choice, regex, json_schema)}
    if prompts is None:
        questions = evaluation.packaged_questions(options.names(tasks), limit)
    else:
        questions = evaluation.read_questions(prompts, options.names(tasks), limit)
    shared |= {"questions": questions, "names": names, "defaults": defaults, "seed": seed}
    measure(evaluation.compare, shared, out, plot, resume, format_, as_json)


bench = typer.Typer(help="Measure samplers.", rich_markup_mode=None, no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure samplers."""


@bench.command()
@options.takes("model cache suffix batch max_new_tokens block_length dtype device as_json")
def parallel(
    samplers: Annotated[list[str] | None, SWEPT] = None,
    settings: int = typer.Option(5, help="Settings of each sampler, 2 to 5."),
    tasks: Tasks = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    out: Out = None,
    plot: Plot = None,
    resume: Resume = False,
    format_: Format = None,
    **shared: Any,
) -> None:
    """Sweep samplers over ParallelBench's waiting lines and Latin squares; report scores, tokens per forward, AUP."""
    as_json = shared.pop("as_json")
    check_output(out, plot, resume, format_, as_json)

    from paradec.tools.evaluation import parallel as benches

    names = options.names(samplers)
    for name in benches.SWEEPS if names is None else names:
        benches.sweep(name, settings)
    benches.parallel_questions(options.names(tasks), limit)
    shared |= {"tasks": options.names(tasks), "limit": limit, "names": names, "settings": settings, "seed": seed}
    shared["suffix"] = paradec.Suffix.of(shared["suffix"])
    measure(benches.parallel, shared, out, plot, resume, format_, as_json)


def check_output(out: Path | None, plot: Path | None, resume: bool, format_: str | None, as_json: bool) -> None:
    """Raise ValueError unless a comparison can be written where it is to go, in the format that is asked for."""
    from paradec.tools.evaluation.plot import check_plot
    from paradec.tools.evaluation.written import FORMATS

    options.check_writable("--out", out)
    options.check_writable("--plot", plot)
    if resume and out is None:
        raise ValueError("--resume goes on with the results in --out FILE.json; give it")
    if plot is not None:
        check_plot(plot)
    if format_ is not None:
        check_choice("--format", format_, FORMATS)
        if as_json:
            raise ValueError(f"--json and --format {format_} are two ways to print the results; give one")


def measure(
    run: Callable[..., Any],
    request: dict[str, Any],
    out: Path | None,
    plot: Path | None,
    resume: bool,
    format_: str | None,
    as_json: bool,
) -> None:
    """Load the model, run a comparison with a progress bar, write it to its files (`out` after every configuration),
    print it, and exit. request: arguments of `run`, and of `options.load`."""
    from paradec.tools import evaluation
    from paradec.tools.evaluation.compare import padding_lines
    from paradec.tools.evaluation.plot import frontier
    from paradec.tools.evaluation.written import FORMATS

    earlier = evaluation.Comparison.from_json(out) if resume and out is not None and out.exists() else None
    model = options.load(request)
    code, saved = 0, 0

    def update(comparison: Any, configuration: Any, share: float) -> None:
        nonlocal saved
        if out is not None and len(comparison.results) > saved:
            comparison.to_json(out)
            saved = len(comparison.results)
        bar.work(configuration.name, share, comparison.asked, comparison.to_ask)

    raise_again()
    try:
        with show.Bar() as bar:
            found = run(model, **request, resume=earlier, progress=update)
    except paradec.Interrupted as interrupt:
        found, code = interrupt.output, EXIT_CODE
    if out is not None and found.results:
        found.to_json(out)
    if plot is not None and found.results:
        frontier(found, plot)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
        raise typer.Exit(code)
    if format_ is None:
        tables.comparison(found.columns(), found.table())
    else:
        typer.echo(FORMATS[format_](found.columns(), found.table()))
    for line in padding_lines(found.results):
        print(line, file=sys.stderr)
    if code:
        print("interrupted: the configurations that were not finished are missing", file=sys.stderr)
    raise typer.Exit(code)
