"""Texts that end a row of a causal model, as those of masked models do (`paradec.samplers.masked.stopping`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paradec.core.rows import row_layout


@dataclass(init=False, eq=False)
class AnswerTexts:
    """Find the token that completes one of some texts in a row's answer.

    The answer is decoded as a whole, so that a text may lie across tokens, and special tokens count with their names.
    The token that completes it is kept entirely, as transformers' `StopStringCriteria` does; unlike there, the prompt's
    own text is no part of a match.

    Args:
        texts: what to look for.
        tokenizer: the model's.
        rows: how many rows there are.
    """

    texts: list[tuple[str, ...]] = field(metadata=row_layout(fill=()))
    """Of each row; none of rows that have none."""
    answers: list[list[int]] = field(metadata=row_layout(fill=[]))

    def __init__(self, texts: Sequence[str], tokenizer: Any, rows: int):
        self.texts, self.tokenizer = [tuple(texts)] * rows, tokenizer
        self.answers = [[] for _ in range(rows)]

    def cut(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many of the new tokens of each row are kept, and remember these.

        Args:
            rows: [R]. tokens: [R, W] int64, of which `counts` [R] are new.

        Returns:
            [R] int64: as `counts`, or less where a text is completed before; and [R] bool: whether one is.
        """
        kept, stops = counts.copy(), np.zeros(len(rows), bool)
        for index, row in enumerate(rows.tolist()):
            answer, new = self.answers[row], tokens[index, : counts[index]].tolist()
            before = len(answer)
            answer += new
            if new and self._holds(answer, row):
                end = next(end for end in range(before + 1, len(answer) + 1) if self._holds(answer[:end], row))
                kept[index], stops[index] = end - before, True
                del answer[end:]
        return kept, stops

    def _holds(self, answer: list[int], row: int) -> bool:
        if not self.texts[row]:
            return False
        text = self.tokenizer.decode(answer, skip_special_tokens=False)
        return any(wanted in text for wanted in self.texts[row])
