"""`paradec caches`."""

from __future__ import annotations

import typer

import paradec
from paradec.caches.table import summary
from paradec.cli import options, show


def caches(as_json: options.AsList = False) -> None:
    """List the caches and their settings, and which samplers and models each works with."""
    pairs = summary(paradec.samplers.registry, paradec.caches.registry)
    works = {name: [pair for pair in pairs if pair["cache"] == name] for name in paradec.caches.names()}
    show.registry(paradec.caches, as_json, {name: {"works_with": found} for name, found in works.items()})
    if not as_json:
        typer.echo("")
        show.table(tuple(pairs[0]), [tuple(pair.values()) for pair in pairs])
