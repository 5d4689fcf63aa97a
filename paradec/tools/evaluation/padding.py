"""How many forwards decided nothing but padding: positions after an answer's end, which nobody reads.

A sampler that decides a fixed number of positions a step fills the whole block, the padding after a short answer
included. Such forwards make it look slower than it has to be: with shorter blocks most of them are saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from paradec.api.output import Output
from paradec.core.protocol import Commit, State

UNWRITTEN = 2**62
"""In the place of a position, where a step wrote nothing in a row."""
WORTH_SAYING = 0.1
"""Share of a row's forwards from which `padding_lines` names them."""


class PaddingCounter:
    """A `callback` for one `generate` that notes the first position that each step wrote in each row."""

    def __init__(self) -> None:
        self._first: list[tuple[np.ndarray, torch.Tensor]] = []

    def __call__(self, state: State, commit: Commit) -> None:
        if commit.selected is not None and commit.positions is not None:
            first = torch.where(commit.selected, commit.positions, UNWRITTEN).amin(1)
            self._first.append((commit.rows, first.cpu()))

    def forwards(self, output: Output) -> int:
        """Forwards of all rows of the output that wrote something, but only after the row's answer."""
        lengths = output.attention_mask.sum(1).cpu() - output.new_tokens.shape[1] + torch.tensor(output.tokens)
        return sum(int(((first >= lengths[rows]) & (first < UNWRITTEN)).sum()) for rows, first in self._first)


def padding_lines(results: Iterable[Any]) -> list[str]:
    """What to say below a comparison of these `Result`s: a heading, and a line for each that spent a tenth of its
    forwards or more on padding alone; nothing where none did."""
    found = [
        f"  {result.configuration.name}: {result.padding_forwards / result.right()[1]:.1f} of {result.nfe:.1f}"
        for result in results
        if result.padding_forwards >= WORTH_SAYING * result.row_calls
    ]
    heading = "forwards per prompt that decided only padding after the answer (a shorter --block-length saves most):"
    return [heading, *found] if found else []
