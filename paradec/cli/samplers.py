"""`paradec samplers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show, tables

Name = Annotated[str | None, typer.Argument(help="A sampler to describe: its effect, settings and paper.")]


LISTING = Path(paradec.__file__).parent / "samplers" / "listing.json"
"""What `tables.entries` finds of paradec's own samplers, so that nothing need be imported to list them. Written by
`python benchmarks/tables.py`; a test compares it with the classes."""


def listed() -> list[dict[str, Any]]:
    """Entries of all samplers. Of those of other packages, which would have to be imported, the name and the place."""
    known = {entry["name"]: entry for entry in json.loads(LISTING.read_text(encoding="utf-8"))}
    found = []
    for name, place in paradec.samplers.registry.places().items():
        about = f"{place}, of another package: `paradec samplers {name}` says all about it"
        other = {"name": name, "family": "other packages", "summary": about, "paper": "", "arxiv": "", "settings": {}}
        found.append(known.get(name, other))
    return found


def samplers(name: Name = None, as_json: options.AsList = False) -> None:
    """List the samplers and what each does, or say all about one."""
    if name is not None:
        paradec.samplers.registry.check(name)
    if name is not None:
        with show.waiting("reading the samplers"):
            cls = paradec.samplers.get(name)
        works = {"decodes": ", ".join(getattr(cls, "models", ()))}
        tables.sheet("sampler", name, cls, as_json, works)
        return
    found = listed()
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        tables.listing(found, "`paradec samplers NAME` says all about one; `paradec compare` measures them")
