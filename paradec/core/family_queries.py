"""Model calls of the causal, canvas, image and latent families; shapes as in `Query`, with hidden size `D`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.logprobs import StepLogProbs
from paradec.core.query import Cost, Query, StoreCall, WindowLogits, WindowQuery
from paradec.core.weights import weights_lock

MAX_LOGITS = 2**27
"""Maximum number of logits that `score_prompt` holds in memory."""


@dataclass
class CausalQuery(Query):
    index: np.ndarray | None = None
    """[N] int64, on the host: indices of `rows` among the running rows, for steps of several calls."""
    keep_hidden: bool = False
    """Whether the model stores its last hidden states in `hidden`."""
    keep_layers: tuple[int, ...] | None = None
    """Layers, from 0, whose outputs the model stores in `hidden` instead. Of `n` layers, index n - 1 is the last
    layer's output after the final norm, index n the same output before the norm."""
    hidden: Tensor | None = None
    """[R, Q, D]: input of the output matrix at all columns; with `keep_layers` [R, Q, layers * D]."""


@dataclass
class VisibleQuery(CausalQuery):
    """A call over a store. In any topology, a column sees all stored positions and the call's columns in `visible`."""


@dataclass(kw_only=True)
class AnyOrderQuery(Query):
    """A call of an any-order model (`Model.any_order`) by the causal family."""

    decided_at: Tensor
    """[R, Q] int64: rank in the row's order of each decided or drafted position; -1 in the prompt and if undecided."""
    index: np.ndarray


@dataclass
class CanvasQuery(Query):
    soft_embeddings: Tensor | None = None
    """[R, Q, D]: soft embeddings that condition an open canvas; None at first."""
    soften: Callable[[Tensor], Tensor] | None = None
    """Set by the model: logits [..., V] -> soft embeddings [..., D] of the next step."""
    images: Tensor | None = None
    """[number of image tokens, D]: their embeddings, in reading order; None without images."""


@dataclass
class GroupQuery(Query):
    """One call over a key/value store whose slots are ranks in the row's order: the prompt, then the cells in the order
    of their decision. `positions` count the cells row by row. A slot's old content is overwritten before it is read."""

    visible_end: Tensor | None = None
    """[R, Q] int64: end (exclusive) of the slots that each column sees."""


@dataclass(kw_only=True)
class RankedQuery(AnyOrderQuery):
    """One call in any order, for `N` rows of one branch. For each column of `wanted` the model evaluates a mask token,
    which sees the tokens of lower rank and itself. It does not evaluate the masks in `tokens`. Store rows of the second
    branch follow those of the first."""

    ranks: Tensor
    """[N, Q] int64: rank of each column in its row's order, prompt first, for decided and undecided columns."""
    is_wanted: Tensor
    """[N, W] bool: False where `wanted` is padding."""
    scale: Tensor
    """[N, W] float64: guidance scale of each column of `wanted`; unused with one branch."""


@dataclass
class LatentQuery:
    """One call of a continuous model: `N` rows of the state, `R = branches * N` rows in the call, conditional first."""

    rows: np.ndarray
    latent: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs by name, each [R, ...], such as class labels."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: positions (patches) of each row in one branch."""
    kind: str = "full"


@dataclass
class LatentProposal:
    """A continuous model's output for the next step, or its forecast (forecast family)."""

    rows: np.ndarray
    values: Tensor
    """[N, ...] float: the model's output, or its forecast."""
    cost: Cost
    made_at: int = 0
    kind: str = "full"
    """"full", "window", or "forecast" (nothing was evaluated)."""


def build_rows_query(
    model: Any,
    rows: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
    prompts: Sequence[int],
    start: int = 0,
) -> WindowQuery:
    """Build one call for rows of ids, padded on the right, on the model's device.

    rows, positions, prompts: ids, positions to predict and prompt length of each row.
    start: positions before this one are read from row 0 of a store."""
    facts, device = model.facts, model.device
    width, max_wanted = max(map(len, rows)), max(map(len, positions))
    tokens = torch.full((len(rows), width), facts.fill_token_id, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    wanted = torch.zeros(len(rows), max_wanted, dtype=torch.int64)
    for index, (row, row_positions) in enumerate(zip(rows, positions, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        valid[index, : len(row)] = True
        wanted[index, : len(row_positions)] = torch.tensor(row_positions)
    tokens, valid = tokens[:, start:], valid[:, start:]
    shift = 1 if facts.topology == "causal" else facts.shift
    query = WindowQuery(
        rows=np.arange(len(rows)),
        tokens=tokens.to(device),
        positions=torch.arange(start, width, device=device).expand(len(rows), -1),
        wanted=(wanted - shift - start).clamp(min=0).to(device),
        valid=None if valid.all() else valid.to(device),
        window=WindowLogits(np.arange(len(rows))),
        origin=torch.tensor(prompts, device=device).unsqueeze(1) if facts.prompt_aligned else None,
        forwarded=np.array([len(row) - start for row in rows]),
    )
    if start:
        query.store = StoreCall(torch.zeros(len(rows), dtype=torch.int64, device=device), visible_length=start)
    return query


def score_prompt(model: Any, ids: list[int], count: int) -> StepLogProbs:
    """Compute log-probabilities [1, P] of a prompt's tokens under a causal model, NaN for the first token."""
    parts, size = [], max(1, MAX_LOGITS // model.facts.vocab_size)
    with torch.inference_mode(), weights_lock(model):
        for positions in torch.arange(len(ids)).split(size):
            logits = model(build_rows_query(model, [ids], [positions.tolist()], [len(ids)]))
            tokens = torch.tensor([ids])[:, positions].to(logits.device)
            parts.append(StepLogProbs.from_logits(logits, tokens, count))
    scores = StepLogProbs.combine(parts, lambda tensors: torch.cat(tensors, 1).cpu())
    return scores.fill(torch.arange(len(ids)).unsqueeze(0) == 0)
