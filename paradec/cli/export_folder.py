"""`paradec export-folder`: write code that transformers or diffusers load (`paradec.integrations.folders`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KIND = typer.Argument(help="generate (transformers' custom_generate) or pipeline (the class of a diffusers pipeline).")
MODEL = typer.Option(metavar="DIR", help="For pipeline: the folder of the pipeline to accelerate, or digits-dit.")
SAMPLER = typer.Option(help='For pipeline: the sampler, with settings: "taylorseer(interval=4)", "seacache".')


def export_folder(
    kind: Annotated[str, KIND],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    model: Annotated[str | None, MODEL] = None,
    sampler: Annotated[str | None, SAMPLER] = None,
) -> None:
    """Write a folder of code that transformers or diffusers loads and that calls paradec."""
    from paradec.integrations.folders.export import export_folder as export

    for file in export(kind, folder, model=model, sampler=sampler):
        typer.echo(str(file))
