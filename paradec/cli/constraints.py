"""Options for what answers must be: `--choice`, `--regex`, `--json-schema`, and `--hole` of `paradec infill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paradec.cli import options

Choices = Annotated[
    list[str] | None, typer.Option("--choice", metavar="TEXT", help="Answer with one of these texts; repeated.")
]
Pattern = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="Answer with a text that matches this as a whole.")
]
Schema = Annotated[
    Path | None, typer.Option("--json-schema", metavar="FILE", help="Answer with JSON of the schema in this file.")
]
Holes = Annotated[
    list[str] | None,
    typer.Option("--hole", metavar="N=PATTERN", help="Fill the N-th mask, from 1, with what matches; may be repeated."),
]


def constraint(choices: list[str] | None, pattern: str | None, schema: Path | None) -> dict[str, Any]:
    """The argument `constraint` that these options say, if they say one.

    Raises:
        ValueError: several of them, or what they hold is no constraint.
    """
    given = {"--choice": choices or None, "--regex": pattern, "--json-schema": schema}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} both say what an answer must be; give one of them")
    from paradec.constraints.values import Choice, JsonSchema, Regex
    from paradec.core.text_files import read_text

    if schema is not None:
        options.check_readable("--json-schema", schema)
        return {"constraint": JsonSchema(read_text(schema))}
    if pattern is not None:
        return {"constraint": Regex(pattern)}
    return {"constraint": Choice(tuple(choices))} if choices else {}


def of_holes(pairs: list[str] | None) -> dict[str, Any]:
    """The argument `constraints` of `paradec.infill` that `--hole` says, if it is given.

    Raises:
        ValueError: no N=PATTERN, or a number twice.
    """
    from paradec.constraints.values import Regex

    found: dict[int, Any] = {}
    for pair in pairs or ():
        number, equals, pattern = pair.partition("=")
        if not equals or not number.strip().isdecimal() or int(number) < 1:
            raise ValueError(f"--hole takes N=PATTERN with a number from 1, got {pair!r}")
        if int(number) - 1 in found:
            raise ValueError(f"--hole gives {int(number)} twice")
        found[int(number) - 1] = Regex(pattern)
    return {"constraints": found} if found else {}
