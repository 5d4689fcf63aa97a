"""`infill`: fill the masks in a text, with any sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from paradec.api.generate import KINDS, choose_source, decode_request, prepare_request
from paradec.api.output import Output
from paradec.constraints.values import Constraint
from paradec.core.checks import check_int, check_model, short_repr
from paradec.core.prompts import encode
from paradec.request import Arguments, Preset


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

    A hole is a run of masks; a bidirectional model sees the text on both sides. By default all holes are in one block.
    With `block_length`, blocks count from the first mask, and blocks without a mask are skipped (`steps` still counts
    them). Holes are filled without end tokens, because the text continues after them. Masks at the end of the text,
    such as those of `max_new_tokens`, are an answer and may get an end token.

    Args:
        model: from `paradec.load` or `paradec.wrap`.
        prompt: text, a chat whose contents hold masks, input ids that hold the mask id, or a list of one of these
            kinds. Text gets no chat template, and special tokens only on encoders. A chat's last turn, if it is the
            assistant's, is the text to complete.
        input_ids, attention_mask: as in `generate`.
        mask: the text that represents one token to fill; "<mask:3>" and "<mask><mask><mask>" mean three. A space
            before it is ignored; the model decides whether to write one.
        constraints: one constraint per hole in reading order, None where anything is allowed; or a mapping of hole
            numbers, from 0, to constraints. An answer after the text is the last hole. To constrain every hole alike,
            give `constraint` instead.
        preset, arguments: as in `generate`, except for two defaults: `max_new_tokens` is 0 (masks appended after the
            text), and `holes_eos_inf` is True (False lets the model leave a part of a hole empty).

    Returns:
        An `Output`: `text` is the completed text, `fills` the text of each hole, `filled` the positions of holes.

    Raises:
        ValueError: a prompt without a mask, a model or tokenizer without a mask token. Otherwise as `generate`.
    """
    check_model("infill", model, KINDS)
    source = choose_source(prompt, input_ids)
    hole = model.facts.hole_id
    if hole is None:
        raise ValueError(f"infill needs a model with a mask token; {model.facts.name} is autoregressive")
    request, sampler = prepare_request(model, arguments, preset, max_new_tokens=0, holes_eos_inf=True)
    prompts = encode(model, source, attention_mask, request.chat, placeholder=mask)
    for index, row in enumerate(prompts.rows):
        if hole not in row:
            raise ValueError(f"the prompt of row {index} has nothing to fill; put {mask!r} or the mask id in it")
    if constraints is not None or request.constraint is not None:
        masked = [[token == hole for token in row] + [True] * (request.max_new_tokens or 0) for row in prompts.rows]
        num_holes = max(sum(new and not old for new, old in zip(row, [False, *row])) for row in masked)
        request = replace(request, constraint=hole_constraints(constraints, request.constraint, num_holes))
    return decode_request(model, prompts, request, sampler)


def hole_constraints(constraints: Any, constraint: Any, num_holes: int) -> Any:
    """Convert `constraints` (by hole) or `constraint` (for every hole) to one constraint per hole. Raises ValueError if
    both are given, or for another type."""
    if constraints is not None and constraint is not None:
        raise ValueError(
            f"constraints={short_repr(constraints)} and constraint={short_repr(constraint)} both constrain the holes; "
            "give one of them"
        )
    if isinstance(constraints, Mapping):
        for number in constraints:
            check_int("constraints: hole", number, low=0, high=num_holes - 1)
        return tuple(constraints.get(number) for number in range(num_holes))
    if constraints is not None and not isinstance(constraints, (list, tuple)):
        raise ValueError(
            f"constraints={short_repr(constraints)} must be a list, one for each hole, or a mapping of hole numbers"
        )
    if constraints is not None:
        return constraints
    return (constraint,) * num_holes if isinstance(constraint, Constraint) else constraint
