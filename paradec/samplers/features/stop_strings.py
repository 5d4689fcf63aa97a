"""Stop strings: a row ends at the token that completes one of some texts (`stop_strings`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paradec.core.checks import shown
from paradec.core.rows import ROWS, row_layout
from paradec.request import Request
from paradec.samplers.masked.blocks import NEVER

CONTEXT = 8
"""Tokens that are decoded again before new ones, at least: what tokens read may depend on their neighbours."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character read until all are there."""


@dataclass(init=False, eq=False)
class StopStrings:
    """End a row at the token that completes one of some texts, once nothing before it is undecided.

    A text may lie across tokens, and special tokens count with their names. The token that completes it is kept
    entirely, as transformers' `StopStringCriteria` does; unlike there, the prompt's text is not part of a match.
    Answers are decoded incrementally: only new tokens, after a few that are known.

    Args:
        texts: what to look for.
        tokenizer: the model's.
        first: [B] int64: the position from which on text counts.
        mask: the id of undecided positions, in windows that have them.
    """

    texts: list[tuple[str, ...]] = field(metadata=row_layout(fill=()))
    """Of each row; none of rows that have none."""
    first: np.ndarray = field(metadata=ROWS)
    answers: list[list[int]] = field(metadata=row_layout(fill=[]))
    """The tokens of each answer that were read."""
    decoded: list[str] = field(metadata=row_layout(fill=""))
    """Their text; valid up to the last of `marks`."""
    marks: list[list[tuple[int, int]]] = field(metadata=row_layout(fill=[]))
    """Numbers of tokens, ascending, and of the characters that these read: whole ones, so that more tokens follow."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, first: np.ndarray, mask: int | None = None):
        self.texts, self.tokenizer, self.first, self.mask = [tuple(texts)] * len(first), tokenizer, first.copy(), mask
        self.answers, self.decoded, self.marks = [[] for _ in first], [""] * len(first), [[] for _ in first]

    @classmethod
    def from_request(cls, request: Request, model: Any, first: np.ndarray, mask: int | None = None) -> StopStrings:
        """Those of a request that has some. Raises ValueError where there is no tokenizer to read with."""
        texts = (request.stop_strings,) if isinstance(request.stop_strings, str) else tuple(request.stop_strings or ())
        if getattr(model, "tokenizer", None) is None:
            raise ValueError(
                f"stop_strings={shown(request.stop_strings)} needs a tokenizer; {model.facts.name} has none"
            )
        return cls(texts, model.tokenizer, first, mask)

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        """As a stop rule (`paradec.samplers.masked.blocks.StopRule`): read windows [R, W], up to the first mask."""
        window = state.window
        undecided = tokens == self.mask
        if window.host_valid is not None:
            undecided |= ~window.host_valid
        count = np.where(undecided.any(1), undecided.argmax(1), tokens.shape[1])
        begin = window.host_positions[:, 0]
        ends = self.find_ends(window.rows, begin, tokens, np.minimum(begin + count, state.end[window.rows]))
        return ends if (ends < NEVER).any() else None

    def find_ends(self, rows: np.ndarray, begin: np.ndarray, tokens: np.ndarray, final: np.ndarray) -> np.ndarray:
        """Read what is final of some rows.

        Args:
            rows: [R]. begin: [R] int64: the position of each row's first token here; all before it is final.
            tokens: [R, W] int64. final: [R] int64: the position up to which they are final. Tokens that were read
                before may have changed.

        Returns:
            [R] int64: the position after the token that completes a text, `NEVER` where none does.
        """
        ends = np.full(len(rows), NEVER)
        for index, row in enumerate(rows.tolist()):
            if self.texts[row]:
                skipped = int(self.first[row] - begin[index])
                new = tokens[index, max(skipped, 0) : max(final[index] - begin[index], 0)].tolist()
                if (count := self._read(row, max(-skipped, 0), new)) is not None:
                    ends[index] = self.first[row] + count
        return ends

    def _read(self, row: int, begin: int, new: list[int]) -> int | None:
        """Let a row's answer hold the tokens `new` from its token `begin` on. Returns the number of tokens that
        complete a text, None where none is there."""
        answer, marks = self.answers[row], self.marks[row]
        known = answer[begin:]
        same = len(known)
        if known != new[:same]:
            same = next((at for at, (old, now) in enumerate(zip(known, new)) if old != now), len(new))
        before = begin + same
        while marks and marks[-1][0] > before:
            marks.pop()
        answer[before:] = new[same:]
        if len(answer) == before:
            return None
        text, found = self._decode(row, len(answer))
        if found:
            end = next(count for count in range(before + 1, len(answer) + 1) if self._decode(row, count)[1])
            del answer[end:]
            return end
        self.decoded[row] = text
        if text and not text.endswith(INCOMPLETE):
            marks.append((len(answer), len(text)))
        return None

    def _decode(self, row: int, count: int) -> tuple[str, bool]:
        """The text of the first `count` tokens of an answer, and whether a text to look for is in what is new."""
        ids, marks = self.answers[row][:count], self.marks[row]
        text, known = "", 0
        while marks:
            tokens, known = marks[-1]
            begin = next((mark for mark, _ in reversed(marks) if mark <= tokens - CONTEXT), 0)
            before, now = self._text(ids[begin:tokens]), self._text(ids[begin:])
            if before and now.startswith(before):
                text = self.decoded[row][:known] + now[len(before) :]
                break
            marks.pop()  # what follows changed what these tokens read
        else:
            text, known = self._text(ids), 0
        texts = self.texts[row]
        recent = text[max(known + 1 - max(map(len, texts)), 0) :]
        return text, any(wanted in recent for wanted in texts)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text
