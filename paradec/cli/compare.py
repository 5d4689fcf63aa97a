"""`paradec compare` and `paradec bench parallel`: compare right answers and forwards of samplers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show, tables
from paradec.core.checks import check_choice, check_int

PROMPTS = options.existing_file(
    'Your prompts, a line {"prompt": ..., "answer" or "regex": ...} or {"input_ids": ..., "answer_ids": ...}.'
)
SWEPT_SAMPLERS = typer.Option(help="Samplers, separated by commas; by default six confidence rules and baselines.")
OutputOptions = tuple[Path | None, Path | None, bool, str | None, bool]
"""Values of --out, --plot, --resume, --format and --json."""


@options.include(
    "model tasks limit suffix attention attention_set choice regex json_schema after thinking_budget batch "
    "max_new_tokens block_length tokenizer dtype quantization device out plot resume format_ as_json"
)
def compare(
    prompts: Annotated[Path | None, PROMPTS] = None,
    samplers: options.Samplers = None,
    cache: str = typer.Option("none", help="A name that `paradec caches` lists (with settings), or FILE.py:CLASS."),
    defaults: bool = typer.Option(False, "--defaults", help="One row per sampler, with its default settings."),
    seed: options.Seed = 0,
    **shared: Any,
) -> None:
    """Compare samplers, each with several settings, by right answers and forwards."""
    output, tasks, limit = pop_output_options(shared), options.split_names(shared.pop("tasks")), shared.pop("limit")
    check_int("--max-new-tokens", shared["max_new_tokens"], low=1, none=True)

    from paradec.tools import evaluation

    # All arguments are checked before the model is loaded, which may take minutes.
    names = options.sampler_names(samplers)
    evaluation.configurations(names, defaults)
    shared["cache"] = options.import_classes("--cache", cache, "cache")
    paradec.caches.create(shared["cache"])
    shared["attention"] = options.make_attention(shared["attention"], shared.pop("attention_set"))
    shared |= {"suffix": paradec.Suffix.from_value(shared["suffix"]), **options.make_constraint(shared)}
    if prompts is None:
        questions = evaluation.packaged_questions(tasks, limit)
    else:
        questions = evaluation.read_questions(prompts, tasks, limit)
    shared |= {"questions": questions, "names": names, "defaults": defaults, "seed": seed}
    measure(evaluation.compare, shared, output)


# the callback makes a group of one command
bench = typer.Typer(help="Measure samplers.", callback=lambda: None, rich_markup_mode=None, no_args_is_help=True)


@bench.command()
@options.include(
    "model tasks limit cache suffix batch max_new_tokens block_length tokenizer dtype quantization device out plot "
    "resume format_ as_json"
)
def parallel(
    samplers: Annotated[list[str] | None, SWEPT_SAMPLERS] = None,
    settings: int = typer.Option(5, help="Number of settings per sampler, 2 to 5."),
    seed: options.Seed = 0,
    **shared: Any,
) -> None:
    """Sweep samplers over ParallelBench's waiting lines and Latin squares; report scores, tokens per forward, AUP."""
    output = pop_output_options(shared)

    from paradec.tools.evaluation import parallel as benches

    names = options.sampler_names(samplers)
    for name in benches.SWEEPS if names is None else names:
        benches.sweep(name, settings)
    shared["tasks"] = options.split_names(shared["tasks"])
    benches.parallel_questions(shared["tasks"], shared["limit"])
    shared |= {
        "names": names,
        "settings": settings,
        "seed": seed,
        "suffix": paradec.Suffix.from_value(shared["suffix"]),
    }
    measure(benches.parallel, shared, output)


def pop_output_options(shared: dict[str, Any]) -> OutputOptions:
    """Remove the options of the output from `shared` and return them. Raises ValueError for unusable options."""
    from paradec.tools.evaluation.plot import check_plot

    output = out, plot, resume, format_, as_json = tuple(
        shared.pop(name) for name in ("out", "plot", "resume", "format_", "as_json")
    )
    options.check_writable("--out", out)
    options.check_writable("--plot", plot)
    if resume and out is None:
        raise ValueError("--resume continues from the results in --out FILE.json; give --out")
    if plot is not None:
        check_plot(plot)
    if format_ is not None:
        check_choice("--format", format_, tables.FORMATS)
        if as_json:
            raise ValueError(f"--json and --format {format_} are two ways to print the results; give one")
    return output


def measure(run: Callable[..., Any], request: dict[str, Any], output: OutputOptions) -> None:
    """Load the model, run a comparison with a progress bar, write its files (`out` after every configuration), print it
    and exit. request: arguments of `run` and of `options.load`."""
    from paradec.tools import evaluation
    from paradec.tools.evaluation.compare import padding_lines
    from paradec.tools.evaluation.plot import frontier

    out, plot, resume, format_, as_json = output
    previous = evaluation.Comparison.from_json(out) if resume and out is not None and out.exists() else None
    model = options.load(request)
    num_saved = 0

    def update(bar: show.Bar, comparison: Any, configuration: Any, share: float) -> None:
        nonlocal num_saved
        if out is not None and len(comparison.results) > num_saved:
            comparison.to_json(out)
            num_saved = len(comparison.results)
        bar.show_share(configuration.name, share, comparison.num_answered, comparison.num_total)

    outcome, code = show.with_bar(lambda bar: run(model, **request, resume=previous, progress=partial(update, bar)))
    if out is not None and outcome.results:
        outcome.to_json(out)
    if plot is not None and outcome.results:
        frontier(outcome, plot)
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), ensure_ascii=False))
        raise typer.Exit(code)
    if format_ is None:
        tables.table(outcome.columns(), outcome.table())
    else:
        typer.echo(tables.FORMATS[format_](outcome.columns(), outcome.table()))
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores + 1:
        print(f"tokens/s were measured on a busy machine: load {load:.1f} on {cores} cores", file=sys.stderr)
    for line in padding_lines(outcome.results):
        print(line, file=sys.stderr)
    if code:
        print("interrupted: the configurations that were not finished are missing", file=sys.stderr)
    raise typer.Exit(code)
