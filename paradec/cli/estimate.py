"""`paradec estimate`: time, memory and cost of decoding on a device, by arithmetic (`paradec.tools.estimation`)."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from paradec.cli import options, show

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint's folder or its config.json, of which nothing else is read, or one of LLaDA-8B, Dream-7B, "
        "LLaDA2.0-mini.",
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help="h100, h200, a100, l4, rtx4090 or mi300x, by their published peaks; cpu measures this machine for about "
        "ten seconds.",
    ),
]
Batch = Annotated[int, typer.Option(help="Rows decoded together.")]
Prompt = Annotated[int, typer.Option(help="Tokens of each prompt.")]
Answer = Annotated[int, typer.Option(help="Tokens of each answer.")]
CacheName = Annotated[str, typer.Option("--cache", help="A name that `paradec caches` lists.")]
CacheSettings = Annotated[
    list[str] | None, typer.Option("--cache-set", metavar="NAME=VALUE", help="A setting of the cache.")
]
AttentionName = Annotated[str | None, typer.Option("--attention", help="dense or sparsed.")]
AttentionSettings = Annotated[
    list[str] | None, typer.Option("--attention-set", metavar="NAME=VALUE", help="A setting of the attention.")
]
TokensPerForward = Annotated[float, typer.Option(help="Positions of a row that a step makes final, on average.")]
Price = Annotated[float | None, typer.Option("--price-per-hour", help="Price of one device, in any currency.")]
Block = Annotated[int | None, typer.Option(help="Positions of a block; the model's own by default.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the checkpoint's by default.")]
Group = Annotated[int, typer.Option(help="Devices that share every matrix (tensor parallel).")]
Efficiency = Annotated[
    float, typer.Option(help="Share of the device's peaks that is reached; with 1 the times are lower bounds.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the estimate as JSON.")]


@options.takes("suffix")
def estimate(
    model: Source,
    device: DeviceName = "h100",
    batch: Batch = 1,
    prompt: Prompt = 512,
    answer: Answer = 256,
    cache: CacheName = "none",
    cache_set: CacheSettings = None,
    attention: AttentionName = None,
    attention_set: AttentionSettings = None,
    tokens_per_forward: TokensPerForward = 1.0,
    price_per_hour: Price = None,
    block: Block = None,
    dtype: Dtype = None,
    group: Group = 1,
    efficiency: Efficiency = 1.0,
    as_json: AsJson = False,
    **shared: Any,
) -> None:
    """Calculate what decoding takes on a device: time per step, memory, tokens per second, cost.

    No model is run and no weights are read; --device cpu measures this machine.
    """
    settings = options.settings(cache_set, "--cache-set")
    with show.waiting("measuring this machine for ten seconds" if device == "cpu" else "calculating"):
        import paradec

        found = paradec.estimate(
            model,
            device=device,
            batch=batch,
            prompt=prompt,
            answer=answer,
            cache=paradec.caches.create(cache, **settings),
            attention=options.attention_of(attention, attention_set),
            tokens_per_forward=tokens_per_forward,
            price_per_hour=price_per_hour,
            block=block,
            dtype=dtype,
            group=group,
            efficiency=efficiency,
            **shared,
        )
    typer.echo(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if as_json else str(found))
