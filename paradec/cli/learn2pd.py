"""`paradec learn2pd train`: a filter for the sampler learn2pd (`paradec.tools.training.learn2pd`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show
from paradec.core.checks import check_int
from paradec.core.interrupts import EXIT_CODE, raise_again

Out = Annotated[Path, typer.Option(metavar="FILE.safetensors", help="File for the filter.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='A prompt per line, or JSON lines with a "prompt" each in a file named .jsonl. By default prompts of '
        "the packaged tasks (not those of `paradec compare`).",
    ),
]
PerTask = Annotated[int, typer.Option(help="Packaged prompts per task.")]
Kind = Annotated[str, typer.Option(help="block (the paper's, one block length) or features (any).")]
Caches = Annotated[
    list[str] | None, typer.Option("--cache", help="A cache that the filter will be used with; may be repeated.")
]
Epochs = Annotated[int, typer.Option(help="Passes over all records; 40000 in the paper.")]
LearningRate = Annotated[float, typer.Option(help="AdamW's learning rate.")]
Threshold = Annotated[float, typer.Option(help="Acceptance threshold for precision and recall.")]
FalseAcceptWeight = Annotated[float, typer.Option(help="Extra weight of tokens that are not final.")]
Seed = Annotated[int, typer.Option(help="Seed of the split and the weights.")]
Records = Annotated[
    Path | None,
    typer.Option(metavar="FILE.safetensors", help="Store the collected records here, and continue from them."),
]

learn2pd = typer.Typer(help="Filters for the sampler learn2pd.", rich_markup_mode=None, no_args_is_help=True)


@learn2pd.callback()
def _learn2pd() -> None:
    pass


@learn2pd.command()
@options.takes("model block_length max_new_tokens batch dtype device", batch=16)
def train(
    out: Out,
    prompts: Prompts = None,
    per_task: PerTask = 28,
    kind: Kind = "block",
    cache: Caches = None,
    epochs: Epochs = 4000,
    lr: LearningRate = 3e-3,
    threshold: Threshold = 0.96,
    false_accept_weight: FalseAcceptWeight = 1.0,
    seed: Seed = 0,
    records: Records = None,
    **shared: Any,
) -> None:
    """Train a filter: decode prompts one token at a time, replay them greedily, fit a network to what was final."""
    options.check_readable("--prompts", prompts)
    options.check_writable("--out", out)
    options.check_writable("--records", records)

    from safetensors import SafetensorError

    from paradec.samplers.masked.rules.learn2pd_filter import save_filter
    from paradec.tools.training import learn2pd as training

    # Everything is checked before the model is loaded, and before the hours of collecting.
    training.check_settings(kind, epochs, lr, threshold, false_accept_weight, seed)
    for name in cache or []:
        paradec.caches.create(name)
    check_int("batch", shared["batch"], low=1)
    for name in ("max_new_tokens", "block_length"):
        check_int(name, shared[name], low=1, none=True)

    texts = training.packaged_prompts(per_task, seed) if prompts is None else training.read_prompts(prompts)
    earlier = training.Records.load(records) if records is not None and records.exists() else None
    loaded = options.load(shared)
    decoding = shared | {"caches": cache or ["none"], "resume": earlier}
    fitting: dict[str, Any] = {"kind": kind, "epochs": epochs, "lr": lr, "threshold": threshold, "seed": seed}
    fitting["false_accept_weight"] = false_accept_weight
    facts, network = collect_and_train(loaded, texts, records, decoding, fitting)
    try:
        save_filter(out, facts, network)
    except SafetensorError as error:  # of the file system; it is no OSError
        raise OSError(f"cannot write --out {str(out)!r}: {error}") from error
    typer.echo(show.filter_summary(out, facts.held_out, threshold))


def collect_and_train(
    model: Any, texts: Any, records: Path | None, decoding: dict[str, Any], fitting: dict[str, Any]
) -> tuple[Any, Any]:
    """Run `collect` and `train` of `paradec.tools.training.learn2pd`, with a progress bar.

    Args:
        records: where what is collected is kept. decoding: arguments of `collect`. fitting: arguments of `train`.

    Returns:
        The filter's facts and its network.

    Raises:
        typer.Exit: Ctrl-C; what was collected is kept.
    """
    from paradec.tools.training import learn2pd as training

    def save(collected: Any) -> None:
        if records is not None and collected.done:
            collected.save(records)

    bar = show.Bar()
    raise_again()
    try:
        with bar:
            collected = training.collect(model, texts, **decoding, checkpoint=save, progress=bar.work)
            save(collected)
            return training.train(collected, **fitting, progress=bar.work)
    except paradec.Interrupted as interrupt:
        save(interrupt.output)
        kept = f"; {interrupt.output.done} prompts are kept" if records is not None else ""
        print(f"interrupted{kept}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
