"""What is asked of a model that reads tokens, and what its calls cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


@dataclass
class Query:
    """One model call: what is evaluated for the rows of one shape bucket.

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
    origin: Tensor | None = None
    """[R, 1] int64: where each row's prompt ends, for models that count blocks from there; None for all others."""
    visible: Tensor | None = None
    """[R, Q, Q] bool: which of the call's columns each column sees; None is the model's own topology. Over a store,
    columns see what is stored elsewhere too, and not what is stored at the positions that the call evaluates."""
    store_rows: Tensor | None = None
    """[R] int64: rows of the key/value store; None evaluates without a store."""
    slots: Tensor | None = None
    """[R, Q] int64: store slot that each position's key and value are written to, -1 for padding (and, with `visible`,
    for columns that are not kept); None writes nothing: a draft over the store."""
    store_index: np.ndarray | None = None
    """[R] int64, on the host: `store_rows` again, where the host knows it: then neighbours are read without a copy."""
    begin: int = 0
    """On models with canvases: the lowest position that the call evaluates."""
    visible_length: int | None = None
    """Slots from here on are seen by no row of the call; None if any may be."""
    step: int = 0
    """How many commits the state had seen, for the store's records."""
    branches: int = 1
    copies: np.ndarray | None = None
    """[N] int64, on the host: how many drafts of each row the call evaluates beside each other; None is one of each."""
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: real (unpadded) positions evaluated for each row in one branch, all drafts together.
    Everywhere else "forwarded" means all branches (`CallCost.add_to` multiplies)."""
    index: np.ndarray | None = None
    """[N] int64, on the host: where `rows` are among the running rows."""
    available: Tensor | None = None
    """[N, W] bool: False where a window position has no logits in this call; None when all have."""
    decided_at: Tensor | None = None
    """[R, Q] int64: after which of the row's steps each position took its token, -1 where it was given or is undecided;
    for models with `reads_order`, None for all others."""
    columns: Tensor | None = None
    """[N, K] int64, distinct within a row: which window positions the `K` columns of `wanted` are for; None when they
    are for all of them, in order."""
    kind: str = "full"
    """"full" (whole sequences) or "window" (a part, over a store); on models with canvases "encode" (final tokens, for
    their keys and values alone) and "canvas" (the open canvases, which write nothing)."""
    soft: Tensor | None = None
    """[R, Q, D]: the soft embeddings that an open canvas is conditioned on; None where there are none yet."""
    soften: Callable[[Tensor], Tensor] | None = None
    """From a model with canvases, with its answer: logits [..., V] -> the soft embeddings [..., D] of the next step."""
    images: Tensor | None = None
    """[N, D]: the embeddings at the image tokens of the call, in reading order; None where it has no images."""
    attention: Any = None
    """What the attention of this call does, row by row (`paradec.attention`); None attends to everything visible."""
    keep_hidden: bool = False
    """Whether the model shall leave its last hidden states in `hidden`."""
    keep_layers: tuple[int, ...] | None = None
    """Layers, from 0, whose outputs the model shall leave in `hidden` in the place of its last hidden states."""
    hidden: Tensor | None = None
    """[R, Q, D]: what the output matrix reads, of all columns of the call; where `keep_hidden` asked for it. With
    `keep_layers` [R, Q, layers * D]: theirs, side by side."""

    def but(self, **changes: Any) -> Query:
        """A copy with other fields (`dataclasses.replace`, without its cost at every step)."""
        query = object.__new__(Query)
        query.__dict__ = self.__dict__ | changes
        if "store_rows" in changes:
            query.__dict__["store_index"] = changes.get("store_index")
        return query


@dataclass
class Cost:
    """What one step spent: a call that a row takes part in is one `nfe`, however many rows it holds of it."""

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
        found = []
        for query in self.queries:
            copies = getattr(query, "copies", None)
            found.append(CallCost(query.rows, query.branches, copies, query.forwarded, query.kind == "full"))
        return found


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
