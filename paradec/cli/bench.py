"""`paradec bench parallel`: what parallel decoding costs, sampler by sampler (`paradec.tools.evaluation.parallel`)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show
from paradec.cli.compare import Limit, Out, Plot, Resume, Seed, check_files, measured, tell

bench = typer.Typer(help="Measure what samplers are worth.", rich_markup_mode=None, no_args_is_help=True)

Samplers = Annotated[
    list[str] | None,
    typer.Option(
        help="Samplers, separated by commas; by default threshold, factor, random, low_confidence, margin, entropy."
    ),
]
Settings = Annotated[int, typer.Option(help="Settings of each sampler, 2 to 5.")]
Tasks = Annotated[list[str] | None, typer.Option(help="Tasks, separated by commas; by default all eleven.")]
Form = Annotated[
    str | None,
    typer.Option(
        help="packaged asks in the packaged model's words (its default), names in plain ones (the default of others)."
    ),
]


@bench.callback()
def _bench() -> None:
    """Measure what samplers are worth."""


@bench.command("parallel")
def parallel(
    model: options.Model = None,
    samplers: Samplers = None,
    settings: Settings = 5,
    form: Form = None,
    tasks: Tasks = None,
    limit: Limit = None,
    cache: options.Cache = "none",
    suffix: options.Suffix = None,
    batch: options.Batch = 1,
    seed: Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    block_length: options.BlockLength = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    out: Out = None,
    plot: Plot = None,
    resume: Resume = False,
    as_json: options.AsJson = False,
) -> None:
    """Sweep samplers over ParallelBench's waiting lines and Latin squares: score over tokens per forward, and AUP."""
    check_files(out, plot, resume)

    from paradec.tools import evaluation
    from paradec.tools.evaluation import parallel as benches

    names = options.names(samplers)
    for name in benches.SWEEPS if names is None else names:
        benches.sweep(name, settings)
    wanted: dict[str, Any] = {"form": form or ("packaged" if model is None else "names"), "tasks": options.names(tasks)}
    wanted |= {"limit": limit, "names": names, "settings": settings, "batch": batch, "seed": seed}
    wanted |= {"cache": cache, "suffix": paradec.Suffix.of(suffix)}
    benches.parallel_questions(wanted["form"], wanted["tasks"], limit)
    earlier = evaluation.Comparison.from_json(out) if resume and out is not None and out.exists() else None
    show.quiet_loading()
    loaded = paradec.load(model, dtype=dtype, device=device)
    found, code = measured(
        benches.parallel,
        loaded,
        out,
        resume=earlier,
        max_new_tokens=max_new_tokens,
        block_length=block_length,
        **wanted,
    )
    tell(found, code, out, plot, as_json)
    raise typer.Exit(code)
