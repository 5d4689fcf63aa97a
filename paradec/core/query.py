"""Model calls of a step, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor


class CopyWithFields:
    """Base of dataclasses that are copied with changed fields at every step."""

    def with_fields(self, **changes: Any) -> Self:
        copy = object.__new__(self.__class__)
        copy.__dict__ = self.__dict__ | changes
        return copy


@dataclass
class StoreCall(CopyWithFields):
    """Rows and slots of a key/value store that one model call reads and writes. Shapes as in `Query`."""

    rows: Tensor
    """[R] int64: rows of the store."""
    slots: Tensor | None = None
    """[R, Q] int64: store slot of each position's key and value, -1 for positions not to store; None stores nothing."""
    index: np.ndarray | None = None
    """[R] int64: `rows` on the host, or None. With it, neighbouring rows are read without a copy."""
    visible_length: int | None = None
    """Number of leading slots that a row may see; None: all."""
    begin: int = 0
    """Lowest position of the call, for models with canvases."""
    step: int = 0
    """`State.commits` at the time of the call."""


@dataclass
class Query(CopyWithFields):
    """One model call for rows of equal width: `N` rows of the state, `R = branches * N` rows in the call, `Q` positions
    per row, and `W` positions per row whose logits are read. Under guidance (`branches == 2`) the first N rows are
    conditional; the last N are the same rows without the prompt."""

    rows: np.ndarray
    """[N] int64, on the host, distinct: rows of the state."""
    tokens: Tensor
    positions: Tensor
    """[R, Q] int64: position ids, 0 at a row's first token."""
    wanted: Tensor | None = None
    """[R, W] int64: columns whose logits are returned; None is all columns."""
    valid: Tensor | None = None
    """[R, Q] bool: False at padding; None without padding."""
    visible: Tensor | None = None
    """[R, Q, Q] bool: columns of the call that each column sees, besides stored slots; None: by the topology."""
    store: StoreCall | None = None
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: evaluated positions of each row in one branch, over all drafts, without padding."""
    kind: str = "full"
    """"full" (whole rows), "rest" (whole rows without a reused prefix) or "window" (part of each row, over a store).
    Models with canvases: "encode" (keys and values of final tokens) or "canvas" (open canvases)."""

    # shortcuts for custom models
    store_rows = property(lambda self: None if self.store is None else self.store.rows)
    slots = property(lambda self: None if self.store is None else self.store.slots)


@dataclass
class WindowLogits(CopyWithFields):
    """Where the logits of a call belong in the windows of the running rows. In this class, W is the window's width and
    K is the number of columns in `Query.wanted`."""

    index: np.ndarray
    """[N] int64, on the host: index of each of the call's rows among the running rows."""
    available: Tensor | None = None
    """[N, W] bool: False where a window position has no logits in this call; None: all have logits."""
    columns: Tensor | None = None
    """[N, K] int64, distinct within a row: window column of each column of `wanted`; None: 0, 1, ..., W - 1."""
    num_drafts: np.ndarray | None = None
    """[N] int64, on the host: number of drafts of each row in the call; None is one."""


@dataclass(kw_only=True)
class WindowQuery(Query):
    """A call of the masked family."""

    window: WindowLogits
    origin: Tensor | None = None
    """[R, 1] int64: end of each row's prompt, for models that count blocks from the prompt's end; else None."""
    decided_at: Tensor | None = None
    """[R, Q] int64, for models with `reads_order`: the row's step that decided each position; -1 at prompt and
    undecided positions."""
    attention: Any = None


@dataclass
class Cost:
    """Cost of one step. A call adds 1 to the `nfe` of each of its rows, for any number of branches and drafts."""

    queries: list[Any]
    batch: int

    nfe = property(lambda self: self.counts[0])
    row_forwards = property(lambda self: self.counts[1])
    forwarded = property(lambda self: self.counts[2])

    @property
    def counts(self) -> np.ndarray:
        """[4, B] int64, on the host: counts of this step, as in `State.counts`."""
        counts = np.zeros((4, self.batch), np.int64)
        for call in self.calls:
            call.add_to(counts)
        return counts

    @property
    def calls(self) -> list[CallCost]:
        calls = []
        for query in self.queries:
            num_drafts = query.window.num_drafts if isinstance(query, WindowQuery) else None
            calls.append(CallCost(query.rows, query.branches, num_drafts, query.forwarded, query.kind == "full"))
        return calls


class CallCost(NamedTuple):
    rows: np.ndarray
    branches: int
    num_drafts: np.ndarray | None
    forwarded: np.ndarray | None
    is_full: bool

    def add_to(self, counts: np.ndarray) -> None:
        """Add this call to `counts` [4, B] in place."""
        counts[0, self.rows] += 1
        counts[1, self.rows] += self.branches if self.num_drafts is None else self.branches * self.num_drafts
        counts[2, self.rows] += 0 if self.forwarded is None else self.branches * self.forwarded
        counts[3, self.rows] += self.is_full


def branch_rows(rows: np.ndarray, batch: int, size: int) -> np.ndarray:
    """Find the indices [branches * N] of `rows` [N] in all branches of an axis of `size = branches * batch` rows."""
    return np.concatenate([rows + branch * batch for branch in range(max(size // max(batch, 1), 1))])


def take_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """Select columns [R, W] of a tensor [R, Q, D]: [R, W, D]."""
    index = columns.to(tensor.device).unsqueeze(-1).expand(-1, -1, tensor.shape[-1])
    return tensor.gather(1, index)
