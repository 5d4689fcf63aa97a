"""`paradec samplers`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import paradec
from paradec.cli import options, show, tables

Name = Annotated[str | None, typer.Argument(help="A sampler to describe: its effect, settings and paper.")]


def samplers(name: Name = None, as_json: options.AsList = False) -> None:
    """List the samplers and what each does, or say all about one."""
    if name is not None:
        paradec.samplers.registry.check(name)
        with show.waiting("reading the samplers"):
            cls = paradec.samplers.get(name)
        works = {"decodes": ", ".join(getattr(cls, "models", ()))}
        tables.sheet("sampler", name, cls, as_json, works)
        return
    with show.waiting("reading the samplers"):
        entries = tables.entries(paradec.samplers)
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        tables.listing(entries, "`paradec samplers NAME` says all about one; `paradec compare` measures them")
