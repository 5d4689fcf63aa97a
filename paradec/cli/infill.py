"""`paradec infill`: masks in a text are filled. What it does and prints is what `paradec generate` does."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paradec.cli import options
from paradec.cli.constraints import Holes, of_holes
from paradec.cli.generate import decode
from paradec.cli.work import one_prompt

Prompt = Annotated[str | None, typer.Option(help="A user's turn; the text is then the assistant's answer.")]
Text = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT", show_default=False, help='Text with <mask> in it, in quotes; "-" reads standard input.'
    ),
]
Mask = Annotated[str, typer.Option(help="Text that represents one token to fill; <mask:3> represents three.")]
BlockLength = Annotated[int | None, typer.Option(help="Tokens per block; by default one block.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to append to the text.")]


@options.takes(
    "model sampler set_ preset cache suffix attention attention_set steps holes_eos_inf temperature top_p top_k "
    "guidance_scale seed num_return_sequences dtype device trace live as_json"
)
def infill(
    context: typer.Context,
    text: Text = None,
    prompt: Prompt = None,
    mask: Mask = "<mask>",
    block_length: BlockLength = None,
    max_new_tokens: MaxNewTokens = 0,
    hole: Holes = None,
    **shared: Any,
) -> None:
    """Fill the masks in a text and report the forwards and time."""
    given = options.read_text(one_prompt(text, "infill"))
    turns: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": given}]
    shared |= of_holes(hole) | {"mask": mask, "block_length": block_length, "max_new_tokens": max_new_tokens}
    decode("infill", given if prompt is None else turns, given=options.given(context), **shared)
