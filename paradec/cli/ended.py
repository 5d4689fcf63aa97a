"""Rows of a batch are handed on when they have ended, while the others are still decoded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from paradec.api.generate import output_of
from paradec.api.output import Output
from paradec.core.contract import TextState
from paradec.core.interrupts import held_back
from paradec.core.prompts import Prompts
from paradec.core.protocol import Commit

PACE = 0.2
"""Seconds between two readings of a batch, which decode the text of all of its rows."""


class Ended:
    """A callback of `paradec.generate`: hands on the rows that have ended since it did so before.

    The last rows of a batch are not handed on: they come with its output.

    Args:
        model: that decodes. batch: the rows. tell: called with an output and the rows of it that have ended, while
            Ctrl-C is held back. also: called after every commit.
    """

    def __init__(
        self, model: Any, batch: Prompts, tell: Callable[[Output, list[int]], None], also: Callable[[Any, Any], None]
    ):
        self.model, self.batch, self.tell, self.also = model, batch, tell, also
        self.told = np.zeros(len(batch.rows), bool)
        self.due = time.monotonic() + PACE

    def __call__(self, state: TextState, commit: Commit) -> None:
        ended = ~np.asarray(state.running, bool)
        new = ended & ~self.told
        if new.any() and not ended.all() and time.monotonic() >= self.due:
            output = output_of(self.model, state, self.batch, 0.0)
            with held_back():
                self.told |= new
                self.tell(output, np.flatnonzero(new).tolist())
            self.due = time.monotonic() + PACE
        self.also(state, commit)
