"""`paradec trace`: draw runs that `--trace FILE.json` wrote, as a page, an animation or a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options

FILES = typer.Argument(metavar="FILE.json...", exists=True, dir_okay=False, help="Up to 4 files that `--trace` wrote.")


def trace(
    files: Annotated[list[Path], FILES],
    out: Path | None = typer.Option(None, metavar="FILE", help=".html (a page), .gif, or .png, .pdf, .svg (a plot)."),
    name: list[str] | None = typer.Option(None, "--name", help="Name of a run; once for each file."),
    title: str = typer.Option("", help="Title of a page."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Print the forwards of recorded runs. With --out, also draw the runs, side by side."""
    from paradec.core.trace import Trace
    from paradec.tools.traces.files import PAGES, check_suffix, page, save
    from paradec.tools.traces.payload import check_runs

    options.check_writable("--out", out)
    if out is not None:
        check_suffix(out, "--out")
        if any(out.resolve() == file.resolve() for file in files):
            raise ValueError(f"--out {str(out)!r} is one of the files to read")
    if name and len(name) != len(files):
        raise ValueError(f"--name is given {len(name)} times for {len(files)} files; give one for each, or none")
    traces, stems = [Trace.load(file) for file in files], [file.stem for file in files]
    numbered = [f"{stem} ({i})" if stems.count(stem) > 1 else stem for i, stem in enumerate(stems, 1)]
    run_names = check_runs(traces, name or numbered)
    if out is not None and out.suffix.lower() in PAGES:
        out.write_text(page(traces, run_names, title), encoding="utf-8")
    elif out is not None:
        save(traces, out, run_names)
    runs = [{"name": run_name, **cost(run)} for run_name, run in zip(run_names, traces, strict=True)]
    if as_json:
        typer.echo(json.dumps({"out": None if out is None else str(out), "runs": runs}))
        return
    for row in runs:
        typer.echo(
            "{name}: {sampler}, rows {rows}, steps {steps}, forwards {forwards}, tokens final {final}, {unit} "
            "evaluated {evaluated}".format(**row)
        )
    if out is not None:
        typer.echo(f"written to {out}")


def cost(trace: Any) -> dict[str, Any]:
    """Count the steps, forwards and tokens of a run."""
    last = {(row, position): token for step in trace.steps for row, position, token, _ in step.commits}
    return {
        "sampler": str(trace.settings.get("sampler", "unknown")),
        "rows": trace.batch,
        "steps": len(trace.steps),
        "forwards": max(trace.row_nfe, default=0),
        "final": sum(trace.mask_id is None or token != trace.mask_id for token in last.values()),
        "evaluated": sum(sum(step.forwarded) for step in trace.steps),
        "unit": trace.unit,
    }
