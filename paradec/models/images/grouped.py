"""What a sampler of groups asks of a model. Data alone; it knows neither of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.core.query import Query


@dataclass
class GroupQuery(Query):
    """One call over a key/value store whose slots are ranks: where a position comes in its row's order.

    `positions` are places in the sequence, prompt first, then the cells row by row; its slots are ranks, prompt first,
    then the cells from the first to be decided to the last. What a slot held before is overwritten before it is read.
    """

    sees: Tensor | None = None
    """[R, Q] int64: each column sees the slots below this one, and no others."""
