"""What samplers of groups ask of a model. Data alone; it knows neither of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.core.family_queries import AnyOrderQuery
from paradec.core.query import Query


@dataclass
class GroupQuery(Query):
    """One call over a key/value store whose slots are ranks: where a position comes in its row's order.

    `positions` are places in the sequence, prompt first, then the cells row by row; its slots are ranks, prompt first,
    then the cells from the first to be decided to the last. What a slot held before is overwritten before it is read.
    """

    sees: Tensor | None = None
    """[R, Q] int64: each column sees the slots below this one, and no others."""


@dataclass(kw_only=True)
class RankedQuery(AnyOrderQuery):
    """One call in any order, of `N` rows of one branch: the model asks for each wanted position with a mask that sees
    the tokens of lower rank and itself, and evaluates the tokens among the columns beside these. A column that holds a
    mask is no token. Slots of the store are ranks, those of the second branch's rows after the first one's."""

    ranks: Tensor
    """[N, Q] int64: of each column in its row's order, prompt first, whether it is decided or not."""
    asked: Tensor
    """[N, W] bool: which of the wanted columns are."""
    scale: Tensor
    """[N, W] float64: guidance of each wanted position; of one branch nothing."""
