"""Queries of single families: what they ask of a model besides what every query asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import Cost, Query, StoreCall, WindowLogits, WindowQuery


@dataclass
class CausalQuery(Query):
    """A call of the causal family; shapes as in `Query`."""

    index: np.ndarray | None = None
    """[N] int64, on the host: where `rows` are among the running rows; for steps of several calls."""
    keep_hidden: bool = False
    """Whether the model shall leave its last hidden states in `hidden`."""
    keep_layers: tuple[int, ...] | None = None
    """Layers, from 0, whose outputs the model shall leave in `hidden` in the place of its last hidden states. The last
    layer's is after the final norm; the number after it is the same before it."""
    hidden: Tensor | None = None
    """[R, Q, D]: what the output matrix reads, of all columns of the call; where `keep_hidden` asked for it. With
    `keep_layers` [R, Q, layers * D]: theirs, side by side."""


@dataclass
class VisibleQuery(CausalQuery):
    """A call over a store whose columns see all that is stored, and of each other what `visible` says, whatever the
    model's topology allows: a block of masks that a causal model fills, say."""


@dataclass(kw_only=True)
class AnyOrderQuery(Query):
    """A call of a model of any order (`Model.any_order`) by the causal family; shapes as in `Query`."""

    decided_at: Tensor
    """[R, Q] int64: the rank of each position in its row's order, -1 where it was given or would come next."""
    index: np.ndarray
    """As in `CausalQuery`."""


@dataclass
class CanvasQuery(Query):
    """A call of a model with canvases; shapes as in `Query`."""

    soft_embeddings: Tensor | None = None
    """[R, Q, D]: the soft embeddings that an open canvas is conditioned on; None where there are none yet."""
    soften: Callable[[Tensor], Tensor] | None = None
    """From the model, with its answer: logits [..., V] -> the soft embeddings [..., D] of the next step."""
    images: Tensor | None = None
    """[N, D]: the embeddings at the image tokens of the call, in reading order; None where it has no images."""


@dataclass
class GroupQuery(Query):
    """One call over a key/value store whose slots are ranks: where a position comes in its row's order.

    `positions` are places in the sequence, prompt first, then the cells row by row; its slots are ranks, prompt first,
    then the cells from the first to be decided to the last. What a slot held before is overwritten before it is read.
    """

    visible_end: Tensor | None = None
    """[R, Q] int64: each column sees the slots below this one, and no others."""


@dataclass(kw_only=True)
class RankedQuery(AnyOrderQuery):
    """One call in any order, of `N` rows of one branch: the model asks for each wanted position with a mask that sees
    the tokens of lower rank and itself, and evaluates the tokens among the columns beside these. A column that holds a
    mask is no token. Slots of the store are ranks, those of the second branch's rows after the first one's."""

    ranks: Tensor
    """[N, Q] int64: of each column in its row's order, prompt first, whether it is decided or not."""
    is_wanted: Tensor
    """[N, W] bool: which of the wanted columns are."""
    scale: Tensor
    """[N, W] float64: guidance of each wanted position; of one branch nothing."""


@dataclass
class LatentQuery:
    """One call of a continuous model. `N` rows of the state, `R = branches * N` rows in the call.

    Under guidance (`branches == 2`) the first N rows of the call are conditional, the rest are not.
    """

    rows: np.ndarray
    """[N] int64, on the host: the state's rows that this call evaluates."""
    latent: Tensor
    """[R, ...] float."""
    timestep: Tensor
    """Scalar or [R]."""
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    """What else the model reads, by name, each [R, ...]: class labels, say."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: positions (patches) evaluated for each row in one branch, as in `Query`."""
    kind: str = "full"


@dataclass
class LatentProposal:
    """What a continuous model's latent could become, of the forecast family."""

    rows: np.ndarray
    """[R] int64, on the host: rows of the state that this proposal speaks of."""
    values: Tensor
    """[R, ...] float: the model's output, or its forecast."""
    cost: Cost
    made_at: int = 0
    """As for `Proposal`."""
    kind: str = "full"
    """What was evaluated: "full", "window", or "forecast" (nothing)."""


def build_rows_query(
    model: Any, rows: Sequence[Sequence[int]], at: Sequence[Sequence[int]], prompts: Sequence[int], begin: int = 0
) -> WindowQuery:
    """One call that evaluates rows of ids, padded on the right, on the model's device.

    Args:
        rows: the ids of each. at: the positions of each whose tokens are to be predicted, padded with any.
        prompts: how many tokens of each are its prompt, for models whose blocks begin after it.
        begin: positions before it are in the row 0 of a store, and are evaluated by none.
    """
    facts, device = model.facts, model.device
    width, most = max(map(len, rows)), max(map(len, at))
    tokens = torch.full((len(rows), width), facts.fill_token_id, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    wanted = torch.zeros(len(rows), most, dtype=torch.int64)
    for index, (row, places) in enumerate(zip(rows, at, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        valid[index, : len(row)] = True
        wanted[index, : len(places)] = torch.tensor(places)
    tokens, valid = tokens[:, begin:], valid[:, begin:]
    shift = 1 if facts.topology == "causal" else facts.shift
    query = WindowQuery(
        rows=np.arange(len(rows)),
        tokens=tokens.to(device),
        positions=torch.arange(begin, width, device=device).expand(len(rows), -1),
        wanted=(wanted - shift - begin).clamp(min=0).to(device),
        valid=None if valid.all() else valid.to(device),
        window=WindowLogits(np.arange(len(rows))),
        origin=torch.tensor(prompts, device=device).unsqueeze(1) if facts.prompt_aligned else None,
        forwarded=np.array([len(row) - begin for row in rows]),
    )
    if begin:
        query.store = StoreCall(torch.zeros(len(rows), dtype=torch.int64, device=device), visible_length=begin)
    return query
