"""`paradec trace`: runs that `--trace FILE.json` wrote, as a page, an animation or a plot; several of them in step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE.json...", help="Files that `--trace FILE.json` wrote; up to 4.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help=".html (a page to step through), .gif, or .png, .pdf, .svg (a plot)."),
]
Names = Annotated[list[str] | None, typer.Option("--name", help="Name of a run; once for each file.")]
Title = Annotated[str, typer.Option(help="Title of a page.")]


def trace(
    files: Files, out: Out = None, name: Names = None, title: Title = "", as_json: options.AsJson = False
) -> None:
    """Draw recorded runs, several side by side. Without --out, print their forwards."""
    from paradec.core.trace import Trace
    from paradec.tools.traces.files import PAGES, check_suffix, save
    from paradec.tools.traces.html import page
    from paradec.tools.traces.payload import check_runs

    options.check_writable("--out", out)
    if out is not None:
        check_suffix(out, "--out")
    for file in files:
        options.check_readable("FILE", file)
    if out is not None and any(out.resolve() == file.resolve() for file in files):
        raise ValueError(f"--out {str(out)!r} is one of the files to read")
    if name and len(name) != len(files):
        raise ValueError(f"--name is given {len(name)} times for {len(files)} files; give one for each, or none")
    traces = [Trace.load(file) for file in files]
    called = check_runs(traces, name or _told_apart([file.stem for file in files]))
    if out is not None and out.suffix.lower() in PAGES:
        out.write_text(page(traces, called, title), encoding="utf-8")
    elif out is not None:
        save(traces, out, called)
    found = [_numbers(each, run) for each, run in zip(called, traces, strict=True)]
    if as_json:
        typer.echo(json.dumps({"out": None if out is None else str(out), "runs": found}))
        return
    for numbers in found:
        typer.echo(
            "{name}: {sampler}, rows {rows}, steps {steps}, forwards {forwards}, tokens final {final}, {unit} "
            "evaluated {evaluated}".format(**numbers)
        )
    if out is not None:
        typer.echo(f"written to {out}")


def _told_apart(names: list[str]) -> list[str]:
    """Names of files, numbered where they are equal."""
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]


def _numbers(name: str, trace: Any) -> dict[str, Any]:
    """What a run took."""
    last: dict[tuple[int, int], Any] = {
        (row, position): token for step in trace.steps for row, position, token, _ in step.commits
    }
    return {
        "name": name,
        "sampler": str(trace.settings.get("sampler", "unknown")),
        "rows": trace.batch,
        "steps": len(trace.steps),
        "forwards": max(trace.row_nfe, default=0),
        "final": sum(trace.mask_id is None or token != trace.mask_id for token in last.values()),
        "evaluated": sum(sum(step.forwarded) for step in trace.steps),
        "unit": trace.unit,
    }
