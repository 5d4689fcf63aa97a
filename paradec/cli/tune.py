"""`paradec tune`: find settings for a model and prompts (`paradec.tools.tuning`), or solver steps for a pipeline."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show
from paradec.core.checks import check_int, check_temperature
from paradec.core.interrupts import EXIT_CODE

PROMPTS = options.existing_file(
    'Your prompts, a line {"prompt": ...}, with "answer" or "regex" if known; or {"input_ids": ..., "answer_ids": ...}.'
)
BLOCKS = typer.Option(help="Block lengths, separated by commas, 'own' for the model's; by default a few around it.")
SCORE = typer.Option(help="answers (the default if there are any), checker, or agreement with one token per step.")
PIPELINE = typer.Option(metavar="DIR", help="Search --budget solver steps of a diffusers pipeline, or of digits-dit.")
FOR_TEXT = {*"limit score checker mask samplers caches blocks minutes point model max_new_tokens".split()}
FOR_STEPS = {"budget", "steps", "where"}


@options.include("model batch max_new_tokens temperature dtype device as_json", batch=8)
def tune(
    context: typer.Context,
    prompts: Annotated[Path | None, PROMPTS] = None,
    limit: int | None = typer.Option(None, help="Number of prompts: the file's first, or per packaged task."),
    score: Annotated[str | None, SCORE] = None,
    checker: str | None = typer.Option(None, metavar="FILE.py:NAME", help="Function that scores an answer, 0 to 1."),
    mask: str | None = typer.Option(None, help="Text that represents a token to fill, as in `paradec infill`."),
    samplers: options.Samplers = None,
    caches: list[str] | None = typer.Option(None, help="Caches; by default none for forwards, all for seconds."),
    blocks: Annotated[list[str] | None, BLOCKS] = None,
    objective: str = typer.Option("forwards", help="forwards, seconds (measured here), or both."),
    trials: int = typer.Option(40, help="Settings to propose after the hand-made ones."),
    minutes: float | None = typer.Option(None, help="Start no new trial after this time; the report takes extra time."),
    study: Path | None = typer.Option(None, metavar="FILE.db", help="Store the search; the same command continues it."),
    out: Path | None = typer.Option(None, metavar="FILE.json", help="Write the preset, for --preset elsewhere."),
    report: Path | None = typer.Option(None, metavar="FILE.json", help="Write all measurements."),
    point: int | None = typer.Option(None, min=1, help="The point of the front for --out; by default the chosen one."),
    tolerance: float = typer.Option(1.0, help="Points (of 100) by which hand-made settings may beat the preset."),
    seed: int = typer.Option(0, help="Seed of the split into halves, the proposals and the draws."),
    pipeline: Annotated[str | None, PIPELINE] = None,
    budget: int = typer.Option(7, min=1, help="With --pipeline: solver steps to evaluate."),
    steps: int | None = typer.Option(None, min=1, help="With --pipeline: solver steps of a run; by default its own."),
    where: str = typer.Option("output", help="With --pipeline: output, stack, block or module."),
    **shared: Any,
) -> None:
    """Find the sampler, settings, cache and blocks that suit a model and its prompts. They are chosen on one half of
    the prompts; the other half is decoded for the report."""
    files: dict[str, Any] = {"study": study, "out": out, "report": report}
    as_json = shared.pop("as_json")
    if excluded := options.explicit_options(context) & (FOR_STEPS if pipeline is None else FOR_TEXT):
        option = f"--{min(excluded).replace('_', '-')}"
        raise ValueError(f"{option} needs --pipeline" if pipeline is None else f"{option} is not for --pipeline")
    for name, file in files.items():
        options.check_writable(f"--{name}", file)
    if pipeline is not None:
        search: dict[str, Any] = {"budget": budget, "runs": trials, "seed": seed}
        search |= {"sampler": paradec.Forecast(where=where), "dtype": shared["dtype"], "device": shared["device"]}
        raise typer.Exit(search_steps(pipeline, prompts, files, as_json, steps, **search))
    from paradec.tools.evaluation import packaged_questions
    from paradec.tools.tuning.prompts import read_prompts, to_questions
    from paradec.tools.tuning.run import check_search
    from paradec.tools.tuning.scoring import Scorer
    from paradec.tools.tuning.study import check_installed

    # All arguments are checked before the model is loaded, which may take minutes.
    check_installed()
    check_int("max_new_tokens", shared["max_new_tokens"], low=0 if mask else 1, none=True)
    check_temperature("temperature", shared["temperature"])
    sampler_names, cache_names = options.sampler_names(samplers), options.split_names(caches)
    for name in sampler_names or ():
        paradec.samplers.create(name)
    for name in cache_names or ():
        paradec.caches.create(name)
    for text in (block_names := options.split_names(blocks)) or ():
        if text != "own" and not text.isdigit():
            raise ValueError(f"--blocks {text!r} must be a block length, or 'own' for the model's")
    lengths = None if block_names is None else [None if text == "own" else int(text) for text in block_names]
    score_with = None if checker is None else options.import_object("--checker", checker)
    check_search(objective, trials, minutes, tolerance, shared["batch"], seed)
    questions = to_questions(packaged_questions(limit=limit)) if prompts is None else read_prompts(prompts, limit)
    Scorer.from_questions(questions, score, score_with)
    arguments: dict[str, Any] = {"samplers": sampler_names, "caches": cache_names, "blocks": lengths}
    arguments |= {"trials": trials, "minutes": minutes, "tolerance": tolerance, "seed": seed, "score": score}
    arguments |= {"objective": objective, "checker": score_with, "mask": mask, "study": study}
    model = options.load(shared)
    arguments |= {name: value for name, value in shared.items() if value is not None}
    tuning, code = show.with_bar(lambda bar: paradec.tune(model, questions, progress=bar.show_share, **arguments))
    typer.echo(json.dumps(tuning.to_dict(), ensure_ascii=False) if as_json else str(tuning))
    if report is not None:
        tuning.to_json(report)
    if out is not None and tuning.points:
        tuning.save(out, point)
        saved_point = tuning.points[tuning.chosen if point is None else point - 1]
        print(f"preset {str(out)!r}: {saved_point.name}", file=sys.stderr)
    if code:
        print("interrupted" + ("" if study is None else ": the same command continues the study"), file=sys.stderr)
    raise typer.Exit(code)


def search_steps(
    source: str, prompts: Path | None, files: dict[str, Any], as_json: bool, steps: int | None, **search: Any
) -> int:
    """Search the solver steps of a pipeline, print and write the result. Returns the exit code. search: "dtype",
    "device", and arguments of `paradec.tune_steps`."""
    import torch

    from paradec.cli.image import pipeline_index
    from paradec.cli.pipeline import load_pipeline, pipeline_class
    from paradec.models.checkpoint import CheckpointError
    from paradec.tools.tuning.prompts import read_prompts

    check_int("trials", search["runs"], low=0)
    index = pipeline_index(source)
    if index is None:
        raise CheckpointError(f"--pipeline {source!r} is not a diffusers pipeline")
    cls = pipeline_class(index)
    parameters = inspect.signature(cls.__call__).parameters
    if "class_labels" not in parameters and prompts is None:
        raise ValueError(f"{cls.__name__} takes prompts: give --prompts FILE.jsonl; each run takes the next prompt")
    if prompts is not None and "prompt" not in parameters:
        raise ValueError(f"{cls.__name__} takes no prompts; leave --prompts out")
    texts = [] if prompts is None else [entry.prompt for entry in read_prompts(prompts, None)]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"--prompts {str(prompts)!r} holds {text!r}; a pipeline's prompts are texts")
    pipe = load_pipeline(cls, index["folder"], search.pop("dtype"), search.pop("device"))
    options = {} if steps is None else {"num_inference_steps": steps}

    def run(seed: int) -> Any:
        """Run the pipeline once. The seed selects the class or prompt, and the noise."""
        draw = torch.Generator().manual_seed(seed)
        if texts:
            return pipe(prompt=texts[seed % len(texts)], generator=draw, **options)
        classes = pipe.transformer.config.num_embeds_ada_norm
        return pipe(class_labels=[seed % classes], generator=draw, **options)

    try:
        with show.Bar() as bar:
            result = paradec.tune_steps(pipe, run, **search, study=files["study"], progress=bar.show_share)
    except KeyboardInterrupt:
        hint = "" if files["study"] is None else ": the same command continues the study"
        print(f"interrupted{hint}", file=sys.stderr)
        return EXIT_CODE
    typer.echo(json.dumps(result.to_dict()) if as_json else str(result))
    if files["report"] is not None:
        files["report"].write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    if files["out"] is not None:
        result.save(files["out"])
    return 0
