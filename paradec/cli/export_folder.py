"""`paradec export-folder`: code that transformers and diffusers load from a folder (`paradec.integrations.folders`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Kind = Annotated[
    str,
    typer.Argument(
        help="generate (transformers' custom_generate), modular (a block of diffusers' modular pipelines) or pipeline "
        "(a pipeline's class)."
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]
Model = Annotated[
    str | None, typer.Option(metavar="DIR", help="For pipeline: the folder of the pipeline that it is made for.")
]
Sampler = Annotated[
    str | None,
    typer.Option(help='For pipeline: what is attached, with settings: "taylorseer(interval=4)", "seacache".'),
]


def export_folder(kind: Kind, folder: Folder, model: Model = None, sampler: Sampler = None) -> None:
    """Write a folder that transformers or diffusers loads code from, so that their users call paradec from there."""
    from paradec.integrations.folders.export import export_folder as export

    for file in export(kind, folder, model=model, sampler=sampler):
        typer.echo(str(file))
