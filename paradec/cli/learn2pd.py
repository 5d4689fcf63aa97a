"""`paradec learn2pd train`: train a filter for the sampler learn2pd (`paradec.tools.training.learn2pd`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show
from paradec.core.checks import check_int
from paradec.core.interrupts import EXIT_CODE, restore_interrupt

PROMPTS = options.existing_file('A prompt per line; in .jsonl {"prompt": ...}. By default prompts of packaged tasks.')
RECORDS = typer.Option(metavar="FILE.safetensors", help="Store the collected records here, and continue from them.")

HELP = "Filters for the sampler learn2pd."
learn2pd = typer.Typer(help=HELP, callback=lambda: None, rich_markup_mode=None, no_args_is_help=True)


@learn2pd.command()
@options.include("model block_length max_new_tokens batch dtype device", batch=16)
def train(
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="File for the filter.")],
    prompts: Annotated[Path | None, PROMPTS] = None,
    per_task: int = typer.Option(28, help="Packaged prompts per task."),
    kind: str = typer.Option("block", help="block (the paper's, one block length) or features (any)."),
    cache: list[str] | None = typer.Option(None, "--cache", help="A cache that the filter is for; may be repeated."),
    epochs: int = typer.Option(4000, help="Passes over all records; 40000 in the paper."),
    lr: float = typer.Option(3e-3, help="AdamW's learning rate."),
    threshold: float = typer.Option(0.96, help="Acceptance threshold for precision and recall."),
    false_accept_weight: float = typer.Option(1.0, help="Loss weight of candidates that are not final."),
    seed: int = typer.Option(0, help="Seed of the split and the weights."),
    records: Annotated[Path | None, RECORDS] = None,
    **shared: Any,
) -> None:
    """Train a filter: decode prompts one token at a time, replay them greedily, learn which tokens were final."""
    options.check_writable("--out", out)
    options.check_writable("--records", records)

    from safetensors import SafetensorError

    from paradec.samplers.masked.rules.learn2pd_filter import save_filter
    from paradec.tools.training import learn2pd as training

    # All arguments are checked before the model is loaded and hours of collecting begin.
    settings: dict[str, Any] = {"kind": kind, "epochs": epochs, "lr": lr, "threshold": threshold, "seed": seed}
    settings["false_accept_weight"] = false_accept_weight
    training.check_settings(**settings)
    for name in cache or []:
        paradec.caches.create(name)
    check_int("max_new_tokens", shared["max_new_tokens"], low=1, none=True)
    texts = training.packaged_prompts(per_task, seed) if prompts is None else training.read_prompts(prompts)
    previous = training.Records.load(records) if records is not None and records.exists() else None
    model = options.load(shared)

    def save(collected: Any) -> None:
        if records is not None and collected.done:
            collected.save(records)

    collect_arguments = shared | {"caches": cache or ["none"], "resume": previous, "checkpoint": save}
    restore_interrupt()
    try:
        with show.Bar() as bar:
            collected = training.collect(model, texts, **collect_arguments, progress=bar.show_share)
            save(collected)
            facts, network = training.train(collected, **settings, progress=bar.show_share)
    except paradec.Interrupted as interrupt:
        save(interrupt.output)
        hint = f"; {interrupt.output.done} prompts are stored" if records is not None else ""
        print(f"interrupted{hint}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    try:
        save_filter(out, facts, network)
    except SafetensorError as error:  # an error of the file system, but not an OSError
        raise OSError(f"cannot write --out {str(out)!r}: {error}") from error
    held_out = facts.held_out
    typer.echo(
        f"{out}: precision {held_out['precision']:.4f}, recall {held_out['recall']:.4f} at {threshold:g}, over "
        f"{held_out['undecided']} undecided positions of prompts outside the training set"
    )
