"""`paradec verify`: a decoder against recorded traces and exact distributions (`paradec.tools.conformance`,
docs/conformance.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options, show
from paradec.core.checks import check_int, check_number
from paradec.core.interrupts import EXIT_CODE
from paradec.core.text_files import write_json

Place = Annotated[
    str | None,
    typer.Option("--target", metavar="FILE.py:NAME", help="A Python function, from a request to an answer."),
]
Line = Annotated[
    str | None,
    typer.Option(
        "--command", metavar="COMMAND", help="A program that reads requests and writes answers, as JSON lines."
    ),
]
DataPath = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", help="The archive of the cases, or its folder; a checkout has them."),
]
Methods = Annotated[list[str] | None, typer.Option("--method", help="Run only cases of this method; may be repeated.")]
Groups = Annotated[
    list[str] | None, typer.Option("--group", help="Run only traces, rows, ties, laws or canvases; may be repeated.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Run one case of each file of traces, and a tenth of the draws.")]
Tolerance = Annotated[
    float | None,
    typer.Option(help="Margin below which a difference is undecided; 1e-5 by default, for float32."),
]
Draws = Annotated[int | None, typer.Option(help="Draws of each distribution; 10000 by default.")]
Timeout = Annotated[float, typer.Option(help="Seconds that an answer of --command may take.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every case's outcome as JSON.")]


def verify(
    target: Place = None,
    command: Line = None,
    data: DataPath = None,
    method: Methods = None,
    group: Groups = None,
    quick: Quick = False,
    tolerance: Tolerance = None,
    draws: Draws = None,
    timeout: Timeout = 600.0,
    json_file: JsonFile = None,
) -> None:
    """Compare a decoder with recorded traces of published code, case by case; without a target, paradec itself.

    Exit status: 0 if nothing differs and nothing failed, else 1.
    """
    if target is not None and command is not None:
        raise ValueError("give --target or --command, not both")
    check_number("--tolerance", tolerance, low=0, high=1, none=True)
    check_int("--draws", draws, low=100, none=True)
    check_number("--timeout", timeout, low=0, open_low=True)
    options.check_writable("--json", json_file)
    with show.waiting("reading the cases"):
        from paradec.tools.conformance import archive, report
        from paradec.tools.conformance.cases import cases
        from paradec.tools.conformance.run import DRAWS, TOLERANCE, Run, run
        from paradec.tools.conformance.targets import Command, Ours

    narrowed: dict[str, Any] = {"quick": True} if quick else {}
    narrowed |= {"method": "+".join(method)} if method else {}
    narrowed |= {"group": "+".join(group)} if group else {}
    with archive.opened(data) as kit:
        chosen = list(cases(kit, method or (), group or (), quick))
        asked: Any = Ours()
        if target is not None:
            asked = options.from_file("--target", target)
        elif command is not None:
            asked = Command(command, timeout)
        show.quiet_loading()
        found = Run(
            target or command or "paradec",
            kit.version,
            kit.digest,
            TOLERANCE if tolerance is None else tolerance,
            draws or (DRAWS // 10 if quick else DRAWS),
            narrowed,
        )
        try:
            with show.Bar() as bar:
                run(asked, kit, chosen, found, lambda done, total: bar.work("cases", done / total))
        finally:
            if command is not None:
                asked.close()
    if json_file is not None:
        write_json(json_file, report.data(found))
    typer.echo(report.text(found))
    if not found.passed:
        raise typer.Exit(EXIT_CODE if found.interrupted else 1)
