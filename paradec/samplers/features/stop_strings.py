"""Stop strings: a row ends at the token that completes a stop string (`stop_strings`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paradec.core.checks import short_repr
from paradec.core.rows import ROWS, row_layout
from paradec.request import Request
from paradec.samplers.masked.blocks import NEVER

CONTEXT = 8
"""Minimum number of old tokens that are decoded again with new tokens: a token's text may depend on its neighbours."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text into which an incomplete character is decoded."""


@dataclass(init=False, eq=False)
class StopStrings:
    """Stop rule: end a row at the token that completes a stop string, once all positions before it are decided.

    A stop string may span several tokens; special tokens count with their names. As in transformers'
    `StopStringCriteria`, the token that completes it stays whole. In contrast to that class, the prompt's text is not
    part of a match. Answers are decoded incrementally.

    texts: the stop strings. first: [B] int64: first position whose text counts. mask: id of undecided positions, for
    windows that may contain such positions."""

    texts: list[tuple[str, ...]] = field(metadata=row_layout(fill=()))
    """The stop strings of each row."""
    first: np.ndarray = field(metadata=ROWS)
    answers: list[list[int]] = field(metadata=row_layout(fill=[]))
    """The tokens read so far of each answer."""
    decoded: list[str] = field(metadata=row_layout(fill=""))
    """Text of each answer's tokens, valid up to the last entry of `marks`."""
    marks: list[list[tuple[int, int]]] = field(metadata=row_layout(fill=[]))
    """Ascending pairs (number of tokens, number of characters in their text) at which the text is complete."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, first: np.ndarray, mask: int | None = None):
        self.texts, self.tokenizer, self.first, self.mask = [tuple(texts)] * len(first), tokenizer, first.copy(), mask
        self.answers, self.decoded, self.marks = [[] for _ in first], [""] * len(first), [[] for _ in first]

    @classmethod
    def from_request(cls, request: Request, model: Any, first: np.ndarray, mask: int | None = None) -> StopStrings:
        texts = (request.stop_strings,) if isinstance(request.stop_strings, str) else tuple(request.stop_strings or ())
        if getattr(model, "tokenizer", None) is None:
            raise ValueError(
                f"stop_strings={short_repr(request.stop_strings)} needs a tokenizer; {model.facts.name} has none"
            )
        return cls(texts, model.tokenizer, first, mask)

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        """Read windows [R, W] up to their first mask, as a `paradec.samplers.masked.blocks.StopRule`."""
        window = state.window
        undecided = tokens == self.mask
        if window.host_valid is not None:
            undecided |= ~window.host_valid
        count = np.where(undecided.any(1), undecided.argmax(1), tokens.shape[1])
        begin = window.host_positions[:, 0]
        positions = self.find_ends(window.rows, begin, tokens, np.minimum(begin + count, state.end[window.rows]))
        return positions if (positions < NEVER).any() else None

    def find_ends(self, rows: np.ndarray, begin: np.ndarray, tokens: np.ndarray, final: np.ndarray) -> np.ndarray:
        """Read tokens [R, W] of `rows` [R], from positions `begin` [R] up to `final` [R]; tokens may have changed since
        an earlier call. Returns [R] int64: the position after the token that completes a stop string, else `NEVER`."""
        positions = np.full(len(rows), NEVER)
        for index, row in enumerate(rows.tolist()):
            if self.texts[row]:
                skipped = int(self.first[row] - begin[index])
                new_tokens = tokens[index, max(skipped, 0) : max(final[index] - begin[index], 0)].tolist()
                if (count := self._write_tokens(row, max(-skipped, 0), new_tokens)) is not None:
                    positions[index] = self.first[row] + count
        return positions

    def _write_tokens(self, row: int, begin: int, new_tokens: list[int]) -> int | None:
        """Write tokens into a row's answer from token `begin` on; return its length up to a stop string, or None."""
        answer, marks = self.answers[row], self.marks[row]
        old_tokens = answer[begin:]
        num_equal = len(old_tokens)
        if old_tokens != new_tokens[:num_equal]:
            num_equal = next(
                (index for index, (old, new) in enumerate(zip(old_tokens, new_tokens)) if old != new), len(new_tokens)
            )
        num_unchanged = begin + num_equal
        while marks and marks[-1][0] > num_unchanged:
            marks.pop()
        answer[num_unchanged:] = new_tokens[num_equal:]
        if len(answer) == num_unchanged:
            return None
        text, is_complete = self._decode(row, len(answer))
        if is_complete:
            end = next(count for count in range(num_unchanged + 1, len(answer) + 1) if self._decode(row, count)[1])
            del answer[end:]
            return end
        self.decoded[row] = text
        if text and not text.endswith(INCOMPLETE):
            marks.append((len(answer), len(text)))
        return None

    def _decode(self, row: int, count: int) -> tuple[str, bool]:
        """Decode the first `count` tokens of an answer; return the text, and whether its new part has a stop string."""
        ids, marks = self.answers[row][:count], self.marks[row]
        text, num_known = "", 0
        while marks:
            num_tokens, num_known = marks[-1]
            begin = next((mark for mark, _ in reversed(marks) if mark <= num_tokens - CONTEXT), 0)
            prefix, extended = self._text(ids[begin:num_tokens]), self._text(ids[begin:])
            if prefix and extended.startswith(prefix):
                text = self.decoded[row][:num_known] + extended[len(prefix) :]
                break
            marks.pop()  # later tokens have changed the text up to this mark
        else:
            text, num_known = self._text(ids), 0
        texts = self.texts[row]
        recent = text[max(num_known + 1 - max(map(len, texts)), 0) :]
        return text, any(stop_string in recent for stop_string in texts)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
