"""Stop strings: texts that end a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paradec.core.rows import ROWS, row_layout
from paradec.samplers.masked.blocks import NEVER


@dataclass(init=False, eq=False)
class StopStrings:
    """End a row at the token that completes one of some texts, once nothing before it is undecided.

    The decided answer is decoded as a whole, so that a text may lie across tokens, and special tokens count with their
    names. The token that completes it is kept entirely, as transformers' `StopStringCriteria` does; unlike there, the
    prompt's own text is no part of a match.

    Args:
        texts: what to look for.
        tokenizer: the model's.
        mask: the mask id.
        canvas: [B, L] int64, the ids that decoding starts from.
        first: [B] int64: the position from which on text counts.
    """

    texts: list[tuple[str, ...]] = field(metadata=row_layout(fill=()))
    """Of each row; none of rows that have none."""
    canvas: np.ndarray = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64 on the host, kept up to date from the windows."""
    first: np.ndarray = field(metadata=ROWS)
    read: np.ndarray = field(metadata=ROWS)
    """[B] int64: the position up to which each row was read."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, mask: int, canvas: np.ndarray, first: np.ndarray):
        self.texts, self.tokenizer, self.mask = [tuple(texts)] * len(canvas), tokenizer, mask
        self.canvas, self.first, self.read = canvas.copy(), first.copy(), first.copy()

    def __call__(self, state: Any, tokens: np.ndarray) -> np.ndarray | None:
        rows = state.window.rows
        before = self.canvas[rows]
        self.canvas[rows[:, None], state.window.host_positions] = tokens
        # a method that revises may have changed what was read
        changed = self.canvas[rows] != before
        self.read[rows] = np.where(changed.any(1), np.minimum(self.read[rows], changed.argmax(1)), self.read[rows])
        self.read[rows] = np.maximum(self.read[rows], self.first[rows])
        length = state.end[rows]
        undecided = (self.canvas[rows] == self.mask) & (np.arange(self.canvas.shape[1]) < length[:, None])
        decided = np.where(undecided.any(1), undecided.argmax(1), length)
        ends = np.full(len(rows), NEVER)
        for index in (decided > self.read[rows]).nonzero()[0]:
            row, end = rows[index], decided[index]
            if self.texts[row] and self._holds(row, end):
                ends[index] = next(stop for stop in range(self.read[row] + 1, end + 1) if self._holds(row, stop))
            self.read[row] = end
        return ends if (ends < NEVER).any() else None

    def _holds(self, row: int, end: int) -> bool:
        """Whether the answer of a row up to the position `end` (exclusive) holds one of the texts."""
        text = self.tokenizer.decode(self.canvas[row, self.first[row] : end].tolist(), skip_special_tokens=False)
        return any(wanted in text for wanted in self.texts[row])
