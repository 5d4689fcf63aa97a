"""Queries: what a step asks of a model, and what its calls cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor


class CopyWithFields:
    """Plain values that are copied with other fields at every step."""

    def with_fields(self, **changes: Any) -> Self:
        """A copy with other fields (`dataclasses.replace`, without its cost)."""
        copy = object.__new__(self.__class__)
        copy.__dict__ = self.__dict__ | changes
        return copy


@dataclass
class StoreCall(CopyWithFields):
    """What one model call reads of a key/value store and writes to it. Shapes: as in `Query`."""

    rows: Tensor
    """[R] int64: rows of the store."""
    slots: Tensor | None = None
    """[R, Q] int64: store slot of each position's key and value, -1 for those that are not stored; None stores none: a
    draft over the store."""
    index: np.ndarray | None = None
    """[R] int64, on the host: equal to `rows`, if known: then neighbouring rows are read without a copy."""
    visible_length: int | None = None
    """Slots from here on are seen by no row; None if any may be."""
    begin: int = 0
    """On models with canvases: the lowest position that the call evaluates."""
    step: int = 0
    """How many commits the state had seen, for the store's records."""


@dataclass
class Query(CopyWithFields):
    """One model call, for the rows of one shape bucket.

    Shapes: `N` rows of this bucket, `R = branches * N` rows in the call, `Q` positions each, `W` wanted positions each.
    Under guidance (`branches == 2`) the first N rows of the call are conditional, the rest the same without prompt.
    """

    rows: np.ndarray
    """[N] int64, on the host, distinct: the state's rows that this call evaluates."""
    tokens: Tensor
    """[R, Q] int64: input ids."""
    positions: Tensor
    """[R, Q] int64: position ids (a row's first token is 0, whatever its padding)."""
    wanted: Tensor | None = None
    """[R, W] int64: columns of the call whose logits are wanted; None asks for all of them."""
    valid: Tensor | None = None
    """[R, Q] bool: False where a column is padding; None when nothing is."""
    visible: Tensor | None = None
    """[R, Q, Q] bool: columns of the call that each column sees; None is the model's topology. Over a store also
    the slots of all positions that the call does not evaluate."""
    store: StoreCall | None = None
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: unpadded positions of each row in one branch, all drafts together. (Elsewhere "forwarded"
    counts all branches.)"""
    kind: str = "full"
    """"full" (whole sequences) or "window" (a part, over a store); on models with canvases "encode" (final tokens, for
    their keys and values alone) and "canvas" (the open canvases, which write nothing)."""

    # for custom models
    store_rows = property(lambda self: None if self.store is None else self.store.rows)
    slots = property(lambda self: None if self.store is None else self.store.slots)


@dataclass
class WindowLogits(CopyWithFields):
    """Places of a call's logits in the running rows' windows."""

    index: np.ndarray
    """[N] int64, on the host: indices of the call's rows among the running rows."""
    available: Tensor | None = None
    """[N, W] bool: False where a window position has no logits in this call; None when all have."""
    columns: Tensor | None = None
    """[N, K] int64, distinct within a row: window positions of the `K` columns of `wanted`; None is all, in order."""
    copies: np.ndarray | None = None
    """[N] int64, on the host: number of each row's drafts in the call; None is one of each."""


@dataclass(kw_only=True)
class WindowQuery(Query):
    """A call of the masked family."""

    window: WindowLogits
    origin: Tensor | None = None
    """[R, 1] int64: where each row's prompt ends, for models that count blocks from there; None for all others."""
    decided_at: Tensor | None = None
    """[R, Q] int64: step of the row that decided each position, -1 for given and undecided ones; for models with
    `reads_order`."""
    attention: Any = None
    """Plan of the call's attention (`paradec.attention`); None attends to everything visible."""


@dataclass
class Cost:
    """Cost of one step. A call is one `nfe` of a row, however many branches and drafts of it the call holds."""

    queries: list[Any]
    batch: int

    nfe = property(lambda self: self.counts[0])
    row_forwards = property(lambda self: self.counts[1])
    forwarded = property(lambda self: self.counts[2])

    @property
    def counts(self) -> np.ndarray:
        """[4, B] int64 on the host, per row of the state: forward calls, rows evaluated, positions evaluated, and
        those of the calls that evaluated it whole."""
        counts = np.zeros((4, self.batch), np.int64)
        for call in self.calls:
            call.add_to(counts)
        return counts

    @property
    def calls(self) -> list[CallCost]:
        """The model calls, without their tensors."""
        calls = []
        for query in self.queries:
            copies = query.window.copies if isinstance(query, WindowQuery) else None
            calls.append(CallCost(query.rows, query.branches, copies, query.forwarded, query.kind == "full"))
        return calls


class CallCost(NamedTuple):
    """What one model call costs; see `Query` for the fields."""

    rows: np.ndarray
    branches: int
    copies: np.ndarray | None
    forwarded: np.ndarray | None
    whole: bool

    def add_to(self, counts: np.ndarray) -> None:
        """Add this call to counts as `Cost.counts` has them, in place."""
        counts[0, self.rows] += 1
        counts[1, self.rows] += self.branches if self.copies is None else self.branches * self.copies
        counts[2, self.rows] += 0 if self.forwarded is None else self.branches * self.forwarded
        counts[3, self.rows] += self.whole


def branch_rows(rows: np.ndarray, batch: int, size: int) -> np.ndarray:
    """Number `rows` [N] of a batch in every branch of an axis of this size."""
    return np.concatenate([rows + branch * batch for branch in range(max(size // max(batch, 1), 1))])


def take_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """tensor [R, Q, D] and columns [R, W] -> [R, W, D]."""
    index = columns.to(tensor.device).unsqueeze(-1).expand(-1, -1, tensor.shape[-1])
    return tensor.gather(1, index)
