"""`paradec tasks`: what the packaged text model can do. Needs neither the model nor torch."""

from __future__ import annotations

import json
import sys

import typer

from paradec.cli import options, tables
from paradec.core import packaged


def tasks(as_json: options.AsList = False) -> None:
    """What the packaged text model can do: its prompts, the words it knows, how long lists may be."""
    rows = [(packaged.example(task), packaged.lengths(task), task) for task in packaged.TEMPLATES]
    if as_json:
        found = [
            {"task": task, "template": packaged.TEMPLATES[task], "example": prompt, "lengths": lengths}
            for prompt, lengths, task in rows
        ]
        typer.echo(json.dumps({"tasks": found, "words": packaged.WORDS, "symbols": packaged.SYMBOLS}, indent=2))
        return
    tables.table(("prompt", "words in the list", "task"), rows)
    if not sys.stdout.isatty():
        typer.echo("words\t" + " ".join(packaged.WORDS))
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    what = f"The {len(packaged.WORDS)} words that lists are made of (Latin squares: A to Z); indices count from 0:"
    console.print(Text(what), Padding(Text(" ".join(packaged.WORDS)), (0, 2)))
    console.print(Text(f'Try: paradec generate "{packaged.example("insert_after")}"', style="dim"))
