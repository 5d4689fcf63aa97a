"""Positions of a row that hold one text of a constraint: whether a text fits them, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paradec.constraints import passes
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.values import Constraint, token_automaton
from paradec.core.checks import shown

LENGTHS = 4096
"""Tokens up to which lengths of texts are looked at for a message."""


class Span(NamedTuple):
    """Positions of a row that hold one text."""

    automaton: TokenAutomaton
    first: int
    stop: int
    after: np.ndarray
    """[stop - first + 1, S] bool: from which states the rest can be filled, with what was given there."""


def refused(constraint: Any, reasons: dict[str, bool]) -> None:
    """Raise ValueError for the first of some reasons that holds."""
    if (why := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
        raise ValueError(f"constraint={shown(constraint)} does not work here: {why}")


def no_texts(model: Any) -> dict[str, bool]:
    """The reason of models that write no texts."""
    name, tokenizer = model.facts.name, getattr(model, "tokenizer", None)
    return {f"it says what texts read, and {name} has no tokenizer": tokenizer is None}


def span_of(
    model: Any,
    value: Constraint,
    suppressed: Sequence[int],
    given: list[int | None],
    first: int,
    ends: bool,
    new: int | None,
    known: dict[Any, Span],
) -> Span:
    """The span of a constraint from position `first` on.

    Args:
        suppressed: ids that are never proposed. given: what each position holds, None where it is undecided. ends:
            whether end tokens may follow its text. new: `max_new_tokens`, for messages. known: spans of earlier rows.

    Raises:
        ValueError: no text fits.
    """
    facts = model.facts
    end_ids = tuple(sorted({*facts.eos_token_ids} - {*suppressed})) if ends else ()
    key = (value, end_ids, first, tuple(given))
    if key not in known:
        automaton = token_automaton(value, model.tokenizer, facts.vocab_size, end_ids, tuple(suppressed))
        if not automaton.states:
            raise ValueError(f"constraint={shown(value)} has no text that the tokenizer can write")
        after = passes.completions(automaton, given, automaton.accept)
        if not after[0, 0]:
            said = f"constraint={shown(value)}: "
            raise ValueError(said + _unfit(model.tokenizer, automaton, given, first, ends, new))
        known[key] = Span(automaton, first, first + len(given), after)
    return known[key]


def _unfit(
    tokenizer: Any, automaton: TokenAutomaton, given: list[int | None], first: int, ends: bool, new: int | None
) -> str:
    """Why no text fits the slots from `first` on."""
    size = len(given)
    if not passes.completions(automaton, [None] * size, automaton.accept)[0, 0]:
        lengths = np.flatnonzero(passes.lengths(automaton, LENGTHS if ends else min(max(2 * size, 64), LENGTHS)))
        if not ends:
            fills = f"fills {lengths[0]} to {lengths[-1]}" if len(lengths) else f"needs more than {LENGTHS}"
            return f"the hole at {first} has {size} masks; the constraint {fills}"
        takes = f"{lengths[0]}" if len(lengths) else f"more than {LENGTHS}"
        name = f"max_new_tokens={size}" if size == new else f"and {size} positions are left"
        return f"the shortest text takes {takes} tokens, {name}"
    for slot, token in enumerate(given):
        part = [*given[: slot + 1], *[None] * (size - slot - 1)]
        if token is not None and not passes.completions(automaton, part, automaton.accept)[0, 0]:
            read = tokenizer.decode([token])
            return f"given token {token} ({read!r}) at {first + slot} is in no text that fits {size} positions"
    raise AssertionError("a text fits")
