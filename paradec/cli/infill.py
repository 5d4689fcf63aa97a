"""`paradec infill`: masks in a text are filled. The rest is as in `paradec generate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paradec.cli import options
from paradec.cli.generate import decode
from paradec.cli.work import one_prompt

TEXT = typer.Argument(metavar="TEXT", help='Text with <mask> in it, in quotes; "-" reads standard input.')
HOLE = typer.Option("--hole", metavar="N=PATTERN", help="Fill the N-th mask, from 1, with what matches; repeated.")


@options.takes(
    "model sampler set_ preset cache suffix attention attention_set steps holes_eos_inf temperature top_p top_k "
    "guidance_scale seed num_return_sequences dtype device trace live as_json"
)
def infill(
    context: typer.Context,
    text: Annotated[list[str] | None, TEXT] = None,
    prompt: str | None = typer.Option(None, help="A user's turn; the text is then the assistant's answer."),
    mask: str = typer.Option("<mask>", help="Text that represents one token to fill; <mask:3> represents three."),
    block_length: int | None = typer.Option(None, help="Tokens per block; by default one block."),
    max_new_tokens: int = typer.Option(0, help="Tokens to append to the text."),
    hole: Annotated[list[str] | None, HOLE] = None,
    **shared: Any,
) -> None:
    """Fill the masks in a text and report the forwards and time."""
    given = options.read_text(one_prompt(text, "infill"))
    turns: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": given}]
    shared |= of_holes(hole) | {"mask": mask, "block_length": block_length, "max_new_tokens": max_new_tokens}
    decode("infill", given if prompt is None else turns, given=options.given(context), **shared)


def of_holes(pairs: list[str] | None) -> dict[str, Any]:
    """The argument `constraints` of `paradec.infill` that `--hole` says, if it is given."""
    from paradec.constraints.values import Regex

    found: dict[int, Any] = {}
    for pair in pairs or ():
        number, equals, pattern = pair.partition("=")
        if not equals or not number.strip().isdecimal() or int(number) < 1:
            raise ValueError(f"--hole takes N=PATTERN with a number from 1, got {pair!r}")
        if int(number) - 1 in found:
            raise ValueError(f"--hole gives {int(number)} twice")
        found[int(number) - 1] = Regex(pattern)
    return {"constraints": found} if found else {}
