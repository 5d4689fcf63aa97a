"""`infill`: what is masked in a text is filled, with any sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from paradec.api.generate import MADE, answer, check_source, own_defaults
from paradec.api.output import Output
from paradec.constraints.values import Constraint
from paradec.core.checks import check_int, check_model, shown
from paradec.core.prompts import encode
from paradec.request import Arguments, Preset, Request


def infill(
    model: Any,
    prompt: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    mask: str = "<mask>",
    constraints: Sequence[Constraint | None] | Mapping[int, Constraint] | None = None,
    preset: Preset | None = None,
    **arguments: Unpack[Arguments],
) -> Output:
    """Fill the masked tokens of a text; everything else is unchanged.

    >>> paradec.infill(model, "The cat <mask> on the <mask:2>.").text    # doctest: +SKIP

    A bidirectional model sees the text on both sides of a hole. By default all holes are one block. With
    `block_length` blocks count from the first mask, and blocks without a mask are skipped (`steps` still counts them).
    Holes are filled without end tokens, because given text follows and special tokens are left out of the text. Masks
    with no given text after them, those of `max_new_tokens` among them, are an answer and may have an end token.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: text, a chat whose contents hold masks, input ids that hold the mask id, or a list of any one of these.
            Text gets no chat template (only the special tokens that a masked language model was trained with). A
            chat's last turn, if it is the assistant's, is the text that is completed.
        input_ids, attention_mask: as in `generate`.
        mask: the text that represents one token to fill; "<mask:3>" and "<mask><mask><mask>" mean three. The
            model decides about a space before it.
        constraints: what each hole must be, in reading order and None where it is free, or a mapping of the numbers of
            holes, from 0, that are not; an answer after the text is the last one. `constraint` says the same of every
            hole.
        preset, arguments: as in `generate`, with two other defaults: `max_new_tokens` is 0 (masks appended after the
            text), and `holes_eos_inf` True (False lets the model leave a part of a hole empty).

    Returns:
        An `Output`: `text` is the completed text, `fills` the text of each hole, `filled` the positions of holes.

    Raises:
        ValueError: a prompt without a mask, a model or tokenizer without a mask token. Otherwise as `generate`.
    """
    check_model("infill", model, MADE)
    check_source(prompt, input_ids)
    hole = model.facts.hole_id
    if hole is None:
        raise ValueError(f"infill needs a model with a mask token; {model.facts.name} is autoregressive")
    request = Request.of(arguments, preset, max_new_tokens=0, holes_eos_inf=True, **own_defaults(model))
    prompts = encode(model, prompt if input_ids is None else input_ids, attention_mask, request.chat, placeholder=mask)
    for index, row in enumerate(prompts.rows):
        if hole not in row:
            raise ValueError(f"the prompt of row {index} has nothing to fill; put {mask!r} or the mask id in it")
    if constraints is not None or request.constraint is not None:
        holes = max(_holes(row, hole, request.max_new_tokens) for row in prompts.rows)
        request = replace(request, constraint=_of_holes(constraints, request.constraint, holes))
    return answer(model, prompts, request, arguments)


def _holes(row: list[int], hole: int, new: int | None) -> int:
    """How many stretches of a row are to be filled."""
    masked = [token == hole for token in row] + [True] * (new or 0)
    return sum(here and not before for here, before in zip(masked, [False, *masked]))


def _of_holes(given: Any, every: Any, holes: int) -> Any:
    """The constraint of a request whose prompts have so many holes.

    Raises:
        ValueError: both are said, or no list and no mapping of numbers of holes.
    """
    if given is not None and every is not None:
        raise ValueError(f"constraints={shown(given)} and constraint={shown(every)} both say it; give one of them")
    if isinstance(given, Mapping):
        for number in given:
            check_int("constraints: hole", number, low=0, high=holes - 1)
        return tuple(given.get(number) for number in range(holes))
    if given is not None and not isinstance(given, (list, tuple)):
        raise ValueError(f"constraints={shown(given)} must be a list, one for each hole, or a mapping of their numbers")
    if given is not None:
        return given
    return (every,) * holes if isinstance(every, Constraint) else every
