"""The texts of the tokens in a trace, for those who look at it without the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paradec.core.trace import Trace

BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST_JOINED = 8
"""Tokens that one character can be spread over."""
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def name_tokens(trace: Trace, tokenizer: Any) -> None:
    """Write down the text of every token of a trace, and which final tokens make a character together alone."""
    if tokenizer is None or not trace.canvas:
        return
    ids = {token for row in trace.canvas for token in row}
    for step in trace.steps:
        ids.update(token for _, _, token, _ in step.commits)
        ids.update(token for _, _, token in step.rejected or ())
    trace.texts = token_texts(tokenizer, sorted(ids))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
    trace.special = sorted(ids & special)
    trace.joined = [joined(tokenizer, row, trace.texts) for row in trace.replay()]


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token by itself, with the space before it where it has one."""
    found = {}
    for token in ids:
        text = tokenizer.decode([token], skip_special_tokens=False)
        piece = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else None
        # decoders take the space off what they believe to be the first word
        if isinstance(piece, str) and piece.startswith(METASPACE) and not text.startswith(" "):
            text = " " + text
        found[token] = text
    return found


def joined(tokenizer: Any, row: Sequence[int], texts: dict[int, str]) -> list[tuple[int, int, str]]:
    """(first position, the one after the last, text) of neighbours that are parts of one character each."""
    found, start = [], 0
    while start < len(row):
        stop = start + 1
        if BROKEN in texts.get(row[start], ""):
            for end in range(start + 2, min(start + MOST_JOINED, len(row)) + 1):
                if BROKEN not in texts.get(row[end - 1], ""):
                    break
                text = tokenizer.decode(row[start:end], skip_special_tokens=False)
                if BROKEN not in text:
                    found.append((start, end, text))
                    stop = end
                    break
        start = stop
    return found
