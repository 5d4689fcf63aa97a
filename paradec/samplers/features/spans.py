"""Spans: positions of a row that together form one text of a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paradec.constraints import passes
from paradec.constraints.automaton import MAX_TABLE_BYTES, ConstraintSizeError, TokenAutomaton
from paradec.constraints.values import Choice, Constraint, Regex, token_automaton
from paradec.core.checks import short_repr
from paradec.core.packaged import vocabulary_hint

LONGEST = 4096
"""Length, in tokens, up to which error messages search for the shortest and longest text of a constraint."""


class TextSpan(NamedTuple):
    """Positions of a row, from `first` to before `stop`, that together form one text."""

    automaton: TokenAutomaton
    first: int
    stop: int
    table: np.ndarray | None
    """[stop - first + 1, S] bool: for each slot, which of the automaton's S states allow the remaining positions to be
    filled. None if these states depend only on the number of positions."""
    budget: int | None = None
    """Maximum number of tokens of free text before the constrained text (`thinking_budget`)."""

    def after(self, slot: int) -> np.ndarray:
        """Return the states from which `slot` and all later slots can be filled: [S] bool."""
        if self.table is not None:
            return self.table[slot]
        states = self.automaton.reach(self.stop - self.first - slot)
        return states if self.budget is None else states & self.automaton.within_budget(self.budget - slot)


class SpanPart(NamedTuple):
    """Part of a span inside a row's window or canvas."""

    row: int
    span: TextSpan
    first: int
    tokens: list[int | None]
    """The tokens, None where undecided."""
    state: int
    """State of the automaton before the first position."""
    last: np.ndarray
    """[S] bool: allowed final states; or [n + 1, S]: allowed states before each of the n tokens and at the end."""

    @property
    def open_positions(self) -> list[int]:
        return [self.first + slot for slot, token in enumerate(self.tokens) if token is None]


def find_parts(
    spans: Sequence[TextSpan], row: int, tokens: np.ndarray, undecided: np.ndarray, begin: int, stop: int
) -> list[SpanPart]:
    """List the parts, from position `begin` to before `stop`, of a row's spans that have undecided positions there. All
    positions before `begin` must be decided. tokens, undecided: [L]."""
    parts = []
    for span in spans:
        first, end = max(span.first, begin), min(span.stop, stop)
        if not undecided[first:end].any():
            continue
        tokens_or_none = [
            None if is_undecided else token
            for token, is_undecided in zip(tokens[first:end].tolist(), undecided[first:end])
        ]
        state = 0
        for token in tokens[span.first : first].tolist():
            state = span.automaton.step(state, token)
        last = span.after(end - span.first)
        if span.budget is not None and span.automaton.free[state]:
            last = np.stack([*map(span.after, range(first - span.first, end - span.first)), last])
        parts.append(SpanPart(row, span, first, tokens_or_none, state, last))
    return parts


def find_spans(model: Any, state: Any, canvas: np.ndarray, hole: int, width: int) -> list[tuple[TextSpan, ...]]:
    """List the spans of each row of a request with a constraint. One constraint has one span, from the first position
    to fill to the end of the answer. A list has one span per hole (run of masks in the prompt).

    state: has `request`, `prompt_length`, `answer_start`, `requested_end`, `max_new_tokens`. canvas: [B, L] int64,
        `hole` at positions to fill. width: maximum number of positions of a step.
    Raises ValueError if no text fits a row, a list does not match the holes, or a step's tables are too large."""
    value: Any = state.request.constraint
    suppressed, spans, rows = excluded_ids(state), dict[Any, TextSpan](), list[tuple[TextSpan, ...]]()
    for row, tokens in enumerate(canvas):
        bounds = (state.prompt_length, state.answer_start, state.requested_end)
        begin, answer, stop = (int(array[row]) for array in bounds)
        edges, entries = [(begin, stop)], [value]
        if not isinstance(value, Constraint):
            masked = np.concatenate(([False], tokens[:stop] == hole, [False]))
            edges = [(a, b) for a, b in np.flatnonzero(masked[1:] != masked[:-1]).reshape(-1, 2).tolist()]
            entries = value
            if len(value) != len(edges):
                raise ValueError(f"constraint has {len(value)} entries for {len(edges)} holes of row {row}")
        row_spans = []
        for entry, (first, end) in zip(entries, edges, strict=True):
            if entry is None:
                continue
            fixed, may_end = [None if token == hole else token for token in tokens[first:end].tolist()], end > answer
            if (key := (entry, may_end, first, *fixed)) not in spans:
                spans[key] = _make_span(model, state, entry, suppressed, fixed, first, may_end)
            row_spans.append(spans[key])
            check_table(entry, spans[key].automaton.states, min(width, end - first) + 1, 8)
        rows.append(tuple(row_spans))
    return rows


def excluded_ids(state: Any) -> tuple[int, ...]:
    """List the ids that a request never proposes."""
    if (allowed := getattr(state, "allowed", None)) is not None:  # causal models
        return tuple(np.flatnonzero(~allowed.cpu().numpy()).tolist())
    suppressed = getattr(state, "suppressed", None)
    return () if suppressed is None else tuple(suppressed.tolist())


def _make_span(
    model: Any,
    state: Any,
    value: Constraint,
    suppressed: Sequence[int],
    fixed: list[int | None],
    first: int,
    may_end: bool,
) -> TextSpan:
    """Make the span of a constraint that begins at position `first`. fixed: its tokens, None at positions to fill.
    may_end: whether an end token may follow the text. Raises ValueError if no text fits."""
    end_ids = tuple(sorted({*model.facts.eos_token_ids} - {*suppressed})) if may_end else ()
    reserved = reserved_tokens(model.facts, may_end or state.request.holes_eos_inf)
    automaton, table = automaton_of(model, value, end_ids, suppressed, reserved), None
    last, budget = automaton.accept, value.thinking_budget
    if automaton.end < 0 or any(token is not None for token in fixed):
        check_table(value, automaton.states, len(fixed) + 1, 1)
        if budget is not None:
            last = np.stack([automaton.within_budget(budget - slot) for slot in range(len(fixed))] + [last])
        table = passes.completions(automaton, fixed, last)
    span = TextSpan(automaton, first, first + len(fixed), table, budget)
    if not span.after(0)[0]:
        why = _explain_misfit(model.tokenizer, automaton, fixed, last, first, may_end, state.max_new_tokens)
        raise ValueError(f"constraint={short_repr(value)}: {why}")
    return span


def check_table(value: Constraint, states: int, slots: int, entry_bytes: int) -> None:
    """Raise ConstraintSizeError if a table of `states` x `slots` entries, `entry_bytes` bytes each, is too large."""
    if (size := states * slots * entry_bytes) > MAX_TABLE_BYTES:
        raise ConstraintSizeError(
            f"constraint={short_repr(value)}: {states} states times {slots} tokens take {size >> 20} MiB, more than "
            f"{MAX_TABLE_BYTES >> 20}; give a smaller constraint, shorter blocks or fewer tokens"
        )


def reserved_tokens(facts: Any, excludes_ends: bool) -> dict[int, str]:
    """Map ids that cannot be part of a text to their roles, in words."""
    roles = {} if facts.mask_token_id is None else {facts.mask_token_id: "the model's mask"}
    return roles | dict.fromkeys(facts.eos_token_ids if excludes_ends else (), "an end token of the model")


def automaton_of(
    model: Any, value: Constraint, end_ids: tuple[int, ...], suppressed: Sequence[int], reserved: dict[int, str]
) -> TokenAutomaton:
    """Make a constraint's automaton over a model's tokens. end_ids: ids that may follow a text. reserved: roles of ids.
    Raises ValueError if the model cannot write any text, or cannot write every text of a choice."""
    tokenizer, size = model.tokenizer, model.facts.vocab_size
    texts = token_automaton(value, tokenizer, size, (), ())
    used_ids = [token for token in reserved if token < size and texts.class_of[token] >= 0]

    def name_used() -> str:
        return ", ".join(
            f"token {token} ({tokenizer.decode([token])!r}), which is {reserved[token]}" for token in used_ids
        )

    if used_ids and isinstance(value, Choice) and value.after is None:
        spelled = ((text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in value.choices)
        text = next(text for text, ids in spelled if {*ids} & {*used_ids})
        raise ValueError(f"constraint={short_repr(value)}: the text {text!r} needs {name_used()}")
    automaton = token_automaton(value, tokenizer, size, end_ids, tuple(sorted({*suppressed, *used_ids} - {*end_ids})))
    if not automaton.states:
        suffix = f" without {name_used()}" if used_ids and texts.states else ""
        if value.after is not None:
            has_marker = token_automaton(Regex(" ?", after=value.after), tokenizer, size, (), ()).states
            reason = "its texts may have to begin with a space" if has_marker else "that marker cannot be written"
            suffix += f" after={value.after!r}: {reason}"
        suffix += vocabulary_hint((), tokenizer)
        raise ValueError(f"constraint={short_repr(value)} has no text that the tokenizer can write{suffix}")
    return automaton


def _explain_misfit(
    tokenizer: Any,
    automaton: TokenAutomaton,
    fixed: list[int | None],
    last: np.ndarray,
    first: int,
    may_end: bool,
    max_new_tokens: int | None,
) -> str:
    size = len(fixed)
    if not automaton.reach(size)[0]:
        lengths = np.flatnonzero(passes.lengths(automaton, LONGEST if may_end else min(max(2 * size, 64), LONGEST)))
        if not may_end:
            fills = f"fills {lengths[0]} to {lengths[-1]}" if len(lengths) else f"needs more than {LONGEST}"
            return f"the hole at {first} has {size} masks; the constraint {fills}"
        shortest = f"{lengths[0]}" if len(lengths) else f"more than {LONGEST}"
        name = f"max_new_tokens={size}" if size == max_new_tokens else f"and {size} positions remain"
        return f"the shortest text takes {shortest} tokens, {name}"
    for slot, token in enumerate(fixed):
        slots = [*fixed[: slot + 1], *[None] * (size - slot - 1)]
        if token is not None and not passes.completions(automaton, slots, last)[0, 0]:
            text = tokenizer.decode([token])
            return f"the prompt's token {token} ({text!r}) at {first + slot} is in no text that fits {size} positions"
    return f"its thinking_budget is too small for a text of {size} tokens"
