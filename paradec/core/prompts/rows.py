"""Prompts as rows of ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.facts import HOLE


@dataclass
class Prompts:
    """Rows of prompt ids without padding, and whether the user gave one prompt or a batch."""

    rows: list[list[int]]
    single: bool
    starts: list[int]
    """Where the text that a reader wants begins in each row of an infill: after the turns before the last one."""

    before: list[int] | None = None
    """How many equal rows are before each, those of other batches included; None where this is the only batch."""
    images: list[Tensor | None] | None = None
    """The embeddings at the image tokens of each row, [N, D], on models that read images."""
    among: bool = False
    """Whether they join rows that are being decoded already (`paradec.batching`)."""

    def repeated(self, times: int) -> Prompts:
        """Every row `times` times, copies side by side."""
        rows = [row for row in self.rows for _ in range(times)]
        starts = [start for start in self.starts for _ in range(times)]
        images = None if self.images is None else [part for part in self.images for _ in range(times)]
        return Prompts(rows, self.single and times == 1, starts, images=images)

    def numbered(self) -> Prompts:
        """The same rows, so that a `part` of them draws what it would draw among all."""
        seen: Counter[tuple[int, ...]] = Counter()
        before = []
        for row in map(tuple, self.rows):
            before.append(seen[row])
            seen[row] += 1
        return replace(self, before=before)

    def part(self, first: int, stop: int) -> Prompts:
        """The rows from `first` to `stop` (exclusive)."""
        before = None if self.before is None else self.before[first:stop]
        images = None if self.images is None else self.images[first:stop]
        return Prompts(self.rows[first:stop], self.single, self.starts[first:stop], before, images)


def check_rows(model: Any, rows: list[list[int]]) -> None:
    """Raise ValueError for an empty row or an id outside the vocabulary."""
    vocab = model.facts.vocab_size
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt of row {index} is empty; give at least one token")
        low = 0 if model.facts.topology != "canvas" else HOLE
        if min(row) < low or max(row) >= vocab:
            wrong = next(i for i in row if i < low or i >= vocab)
            raise ValueError(f"input id {wrong} in row {index} is outside the vocabulary (0 to {vocab - 1})")


def right_aligned(tensor: Tensor, length: np.ndarray, fill: int | bool) -> Tensor:
    """Rows [B, L] that start at column 0 and have `length` [B] entries -> [B, L] rows that end at the last column."""
    source = torch.arange(tensor.shape[1]) - (tensor.shape[1] - torch.as_tensor(length)).unsqueeze(1)
    return tensor.gather(1, source.clamp(min=0)).masked_fill(source < 0, fill)
