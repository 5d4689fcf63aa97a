"""`paradec infill`: masks in a text are filled. What it does and prints is what `paradec generate` does."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paradec.cli import options
from paradec.cli.generate import decode
from paradec.cli.work import one_prompt

Prompt = Annotated[
    str | None, typer.Option(help="A user's turn of a chat, to which the text is the assistant's answer.")
]
Text = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT", show_default=False, help='Text with <mask> in it, in quotes; "-" reads standard input.'
    ),
]
Mask = Annotated[str, typer.Option(help="Text that represents one token to fill; <mask:3> represents three.")]
BlockLength = Annotated[int | None, typer.Option(help="Tokens per block; by default one block.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to append to the text.")]
HolesEosInf = Annotated[bool, typer.Option(help="Fill holes without end tokens, which shorten them.")]


def infill(
    context: typer.Context,
    text: Text = None,
    prompt: Prompt = None,
    mask: Mask = "<mask>",
    model: options.Model = None,
    sampler: options.Sampler = "threshold",
    set_: options.Set = None,
    preset: options.Preset = None,
    cache: options.Cache = "none",
    suffix: options.Suffix = None,
    attention: options.Attention = None,
    attention_set: options.AttentionSet = None,
    block_length: BlockLength = None,
    steps: options.Steps = None,
    max_new_tokens: MaxNewTokens = 0,
    holes_eos_inf: HolesEosInf = True,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    top_n_sigma: options.TopNSigma = None,
    guidance_scale: options.GuidanceScale = 1.0,
    seed: options.Seed = None,
    num_return_sequences: options.Answers = 1,
    dtype: options.Dtype = None,
    device: options.Device = None,
    trace: options.TraceFile = None,
    live: options.Live = False,
    as_json: options.AsJson = False,
) -> None:
    """Fill the masks in a text, and say what it took."""
    given = options.read_text(one_prompt(text, "infill"))
    turns: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": given}]
    decode(
        "infill",
        given if prompt is None else turns,
        source=model,
        preset=preset,
        given=options.given(context),
        sampler=sampler,
        settings=set_,
        dtype=dtype,
        device=device,
        trace=trace,
        live=live,
        as_json=as_json,
        mask=mask,
        holes_eos_inf=holes_eos_inf,
        cache=cache,
        suffix=suffix,
        attention=attention,
        attention_settings=attention_set,
        block_length=block_length,
        steps=steps,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        top_n_sigma=top_n_sigma,
        guidance_scale=guidance_scale,
        seed=seed,
        num_return_sequences=num_return_sequences,
    )
