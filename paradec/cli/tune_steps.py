"""`paradec tune --pipeline`: the solver steps of a diffusers pipeline (`paradec.tune_steps`)."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import typer

import paradec
from paradec.cli import show
from paradec.cli.image import pipeline_index
from paradec.cli.pipeline import load_pipeline, pipeline_class
from paradec.core.checks import check_int
from paradec.core.interrupts import EXIT_CODE
from paradec.models.checkpoint import CheckpointError


def search_steps(
    source: str,
    *,
    budget: int = 7,
    steps: int | None = None,
    target: str = "output",
    prompts: Path | None,
    runs: int,
    seed: int,
    study: Path | None,
    out: Path | None,
    report: Path | None,
    as_json: bool,
    dtype: str | None = None,
    device: str | None = None,
) -> int:
    """Search, print the result and write the files. Returns the exit code."""
    check_int("trials", runs, low=0)
    sampler = paradec.TaylorSeer(target=target)
    index = pipeline_index(source)
    if index is None:
        raise CheckpointError(f"--pipeline {source!r} is no diffusers pipeline")
    cls = pipeline_class(index)
    takes = inspect.signature(cls.__call__).parameters
    if "class_labels" not in takes and prompts is None:
        raise ValueError(f"{cls.__name__} takes prompts: give --prompts FILE.jsonl, of which each run takes the next")
    if prompts is not None and "prompt" not in takes:
        raise ValueError(f"{cls.__name__} takes no prompts; leave --prompts out")
    texts = [] if prompts is None else _texts(prompts)
    pipe = load_pipeline(cls, index["folder"], dtype, device)
    options = {} if steps is None else {"num_inference_steps": steps}

    def run(seed: int) -> Any:
        """One run of a seed: the next class or prompt, and noise of its own."""
        draw = torch.Generator().manual_seed(seed)
        if texts:
            return pipe(prompt=texts[seed % len(texts)], generator=draw, **options)
        classes = pipe.transformer.config.num_embeds_ada_norm
        return pipe(class_labels=[seed % classes], generator=draw, **options)

    try:
        with show.Bar() as bar:
            found = paradec.tune_steps(
                pipe, run, budget=budget, sampler=sampler, runs=runs, seed=seed, study=study, progress=bar.work
            )
    except KeyboardInterrupt:
        print("interrupted" + ("" if study is None else ": the same command goes on with --study"), file=sys.stderr)
        return EXIT_CODE
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))
    if report is not None:
        report.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    if out is not None:
        found.save(out)
    return 0


def _texts(file: Path) -> list[str]:
    """The prompts of a file of JSON lines, which must be texts."""
    from paradec.tools.tuning.prompts import read_prompts

    found = [entry.prompt for entry in read_prompts(file, None)]
    for text in found:
        if not isinstance(text, str):
            raise ValueError(f"--prompts {str(file)!r} holds {text!r}; a pipeline's prompts are texts")
    return found
