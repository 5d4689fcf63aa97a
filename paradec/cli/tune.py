"""`paradec tune`: settings for a model and its prompts, and a preset of them (`paradec.tools.tuning`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show
from paradec.core.checks import check_int, check_temperature
from paradec.core.interrupts import EXIT_CODE, raise_again

Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Your own prompts, one JSON object a line: {"prompt": ...}, with "answer" or "regex" where you know what '
        'is right; or {"input_ids": [...], "answer_ids": [...]}. By default the packaged ones.',
    ),
]
Limit = Annotated[
    int | None, typer.Option(help="Number of prompts: the first of a file, or this many of each packaged task.")
]
Samplers = Annotated[
    list[str] | None,
    typer.Option(
        help="Samplers, separated by commas, combinations, and samplers of your own (FILE.py:NAME); by default every "
        "masked one that works."
    ),
]
Caches = Annotated[
    list[str] | None,
    typer.Option(help="Caches, separated by commas; by default none for forwards, all for seconds."),
]
Blocks = Annotated[
    list[str] | None,
    typer.Option(help="Block lengths, separated by commas, 'own' for the model's; by default a few around it."),
]
Objective = Annotated[str, typer.Option(help="forwards, seconds (measured here), or both.")]
Score = Annotated[
    str | None,
    typer.Option(
        help="answers, checker, or agreement with one token per step; by default answers if all prompts have one."
    ),
]
Checker = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:NAME", help="A function that scores an answer to a prompt, from 0 to 1."),
]
Mask = Annotated[str | None, typer.Option(help="Text that represents a token to fill, as in `paradec infill`.")]
Trials = Annotated[int, typer.Option(help="Settings to propose after the preset ones.")]
Minutes = Annotated[float | None, typer.Option(help="Start no new trial after this time; the report takes extra time.")]
StudyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.db", help="Store the search here; the same command continues it."),
]
PresetOut = Annotated[
    Path | None, typer.Option("--out", metavar="FILE.json", help="Write the preset, for --preset of other commands.")
]
Report = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write all that was measured.")]
PointNumber = Annotated[
    int | None, typer.Option(help="The point of the front that --out gets; by default the chosen one.")
]
Tolerance = Annotated[
    float,
    typer.Option(help="Points of score that the preset may be below the best hand-set one."),
]
Seed = Annotated[int, typer.Option(help="Seed of the halves, the proposals and the draws.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was found as JSON, not as text.")]


@options.takes("model batch max_new_tokens temperature dtype device", batch=8)
def tune(
    prompts: Prompts = None,
    limit: Limit = None,
    score: Score = None,
    checker: Checker = None,
    mask: Mask = None,
    samplers: Samplers = None,
    caches: Caches = None,
    blocks: Blocks = None,
    objective: Objective = "forwards",
    trials: Trials = 40,
    minutes: Minutes = None,
    study: StudyFile = None,
    out: PresetOut = None,
    report: Report = None,
    point: PointNumber = None,
    tolerance: Tolerance = 1.0,
    seed: Seed = 0,
    as_json: AsJson = False,
    **shared: Any,
) -> None:
    """Find the sampler, settings, cache and blocks that suit a model and its prompts; one half of the prompts
    chooses, the other half is reported."""
    from paradec.tools.tuning.study import check_installed

    # Everything is checked before the model is loaded, which may take minutes.
    check_installed()
    options.check_readable("--prompts", prompts)
    for option, file in (("--out", out), ("--report", report), ("--study", study)):
        options.check_writable(option, file)
    check_int("point", point, low=1, none=True)
    check_int("max_new_tokens", shared["max_new_tokens"], low=0 if mask else 1, none=True)
    check_temperature("temperature", shared["temperature"])
    wanted: dict[str, Any] = space_of(samplers, caches, blocks)
    wanted |= {"objective": objective, "trials": trials, "minutes": minutes, "tolerance": tolerance}
    wanted |= {"batch": shared.pop("batch"), "seed": seed}
    wanted |= {"score": score, "checker": None if checker is None else options.from_file("--checker", checker)}
    from paradec.tools import evaluation
    from paradec.tools.tuning.prompts import prompts_of, read_prompts
    from paradec.tools.tuning.run import check_search
    from paradec.tools.tuning.scoring import Scorer

    check_search(objective, trials, minutes, tolerance, wanted["batch"], seed)
    asked = prompts_of(evaluation.packaged_questions(limit=limit)) if prompts is None else read_prompts(prompts, limit)
    Scorer.of(asked, score, wanted["checker"])
    loaded = options.load(shared)
    request = {name: value for name, value in shared.items() if value is not None}
    found, code = search(loaded, asked, mask=mask, study=study, **wanted, **request)
    typer.echo(json.dumps(found.to_dict(), ensure_ascii=False) if as_json else str(found))
    if report is not None:
        found.to_json(report)
    if out is not None and found.points:
        found.save(out, point)
        print(
            f"preset {str(out)!r}: {found.points[found.chosen if point is None else point - 1].name}", file=sys.stderr
        )
    if code:
        print("interrupted" + ("" if study is None else ": the same command goes on with --study"), file=sys.stderr)
    raise typer.Exit(code)


def space_of(samplers: list[str] | None, caches: list[str] | None, blocks: list[str] | None) -> dict[str, Any]:
    """What these options say, as arguments of `paradec.tune`.

    Raises:
        ValueError: an unknown name, or what is no length.
    """
    names, allowed = options.sampler_names(samplers), options.names(caches)
    for name in names or ():
        paradec.samplers.create(name)
    for name in allowed or ():
        paradec.caches.create(name)
    lengths = None if blocks is None else [_length(text) for text in options.names(blocks) or ()]
    return {"samplers": names, "caches": allowed, "blocks": lengths}


def search(model: Any, prompts: Any, **arguments: Any) -> tuple[Any, int]:
    """Run `paradec.tune` with a progress bar.

    Returns:
        The `Tuning`, of an interrupted one what was found so far, and the exit code.
    """
    bar = show.Bar()
    raise_again()
    try:
        with bar:
            return paradec.tune(model, prompts, progress=bar.work, **arguments), 0
    except paradec.Interrupted as interrupt:
        return interrupt.output, EXIT_CODE


def _length(text: str) -> int | None:
    if text == "own":
        return None
    if not text.isdigit():
        raise ValueError(f"--blocks {text!r} must be a block length, or 'own' for the model's")
    return int(text)
