"""`paradec samplers`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import paradec
from paradec.cli import options, show, tables

Name = Annotated[str | None, typer.Argument(help="One of them: what it does, its settings and its paper.")]


def samplers(name: Name = None, as_json: options.AsList = False) -> None:
    """List the samplers and what each does, or say all about one."""
    if name is not None:
        paradec.samplers.registry.check(name)
    with show.waiting("reading the samplers"):
        found = tables.entries(paradec.samplers) if name is None else []
        cls = paradec.samplers.get(name) if name is not None else None
    if name is not None:
        works = {"decodes": ", ".join(getattr(cls, "models", ()))}
        tables.sheet("sampler", name, cls, as_json, works)
    elif as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        tables.listing(found, "`paradec samplers NAME` says all about one; `paradec compare` measures them")
