"""`paradec bench parallel`: what parallel decoding costs, sampler by sampler (`paradec.tools.evaluation.parallel`)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options
from paradec.cli.compare import Format, Limit, Out, Plot, Resume, Seed, check_files, check_format, measured, tell

bench = typer.Typer(help="Measure samplers.", rich_markup_mode=None, no_args_is_help=True)

Samplers = Annotated[
    list[str] | None,
    typer.Option(
        help="Samplers, separated by commas; by default threshold, factor, random, low_confidence, margin, entropy."
    ),
]
Settings = Annotated[int, typer.Option(help="Settings of each sampler, 2 to 5.")]
Tasks = Annotated[list[str] | None, typer.Option(help="Tasks, separated by commas; by default all eleven.")]


@bench.callback()
def _bench() -> None:
    """Measure samplers."""


@bench.command("parallel")
@options.takes("model cache suffix batch max_new_tokens block_length dtype device as_json")
def parallel(
    samplers: Samplers = None,
    settings: Settings = 5,
    tasks: Tasks = None,
    limit: Limit = None,
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    resume: Resume = False,
    format_: Format = None,
    **shared: Any,
) -> None:
    """Sweep samplers over ParallelBench's waiting lines and Latin squares; report scores, tokens per forward, AUP."""
    check_files(out, plot, resume)
    check_format(format_, shared["as_json"])

    from paradec.tools import evaluation
    from paradec.tools.evaluation import parallel as benches

    names = options.names(samplers)
    for name in benches.SWEEPS if names is None else names:
        benches.sweep(name, settings)
    wanted: dict[str, Any] = {"tasks": options.names(tasks), "limit": limit, "names": names}
    wanted |= {"settings": settings, "seed": seed}
    as_json, shared["suffix"] = shared.pop("as_json"), paradec.Suffix.of(shared["suffix"])
    benches.parallel_questions(wanted["tasks"], limit)
    earlier = evaluation.Comparison.from_json(out) if resume and out is not None and out.exists() else None
    loaded = options.load(shared)
    found, code = measured(benches.parallel, loaded, out, resume=earlier, **wanted, **shared)
    tell(found, code, out, plot, as_json, format_)
    raise typer.Exit(code)
