"""Model calls of the causal, canvas, image and latent families.

Shapes as in `Query`: `N` rows of the state, `R = branches * N` rows in the call, `Q` columns (positions) per row, `W`
columns whose logits are read; hidden size `D`, vocabulary size `V`."""

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
"""Maximum number of logits that `score_prompt` computes in one call."""


@dataclass
class CausalQuery(Query):
    index: np.ndarray | None = None
    """[N] int64, on the host: index of each of `rows` among the state's running rows."""
    keep_hidden: bool = False
    """Whether the model stores its last hidden states in `hidden`."""
    keep_layers: tuple[int, ...] | None = None
    """Layers (from 0) whose outputs the model stores in `hidden`, instead of the last hidden states. In a model of `n`
    layers, n - 1 is the last layer's output after the final norm, and n is the same output before the norm."""
    hidden: Tensor | None = None
    """[R, Q, D]: the last hidden states, which the output matrix multiplies; with `keep_layers` the layers' outputs
    [R, Q, number of layers * D]."""


@dataclass
class VisibleQuery(CausalQuery):
    """A call over a key/value store. Whatever the model's topology, a column sees all stored positions, and the call's
    columns that are True in `visible`."""


@dataclass(kw_only=True)
class AnyOrderQuery(Query):
    """A call of an any-order model (`Model.any_order`) by the causal family."""

    decided_at: Tensor
    """[R, Q] int64: rank of each decided or drafted position in its row's order; -1 at prompt and undecided ones."""
    index: np.ndarray
    """[N] int64, on the host: index of each of `rows` among the state's running rows."""


@dataclass
class CanvasQuery(Query):
    soft_embeddings: Tensor | None = None
    """[R, Q, D]: soft embeddings that condition an open canvas; None in the canvas's first step."""
    soften: Callable[[Tensor], Tensor] | None = None
    """Function that the model sets: from logits [..., V] to soft embeddings [..., D] for the next step."""
    images: Tensor | None = None
    """[number of image tokens, D]: embeddings of the prompts' image tokens, in reading order; None without images."""


@dataclass
class GroupQuery(Query):
    """One call over a key/value store. A position's slot is its rank: the prompt comes first, then the image's cells in
    the order of their decisions. `positions` number cells in raster order. The call writes its slots, then reads."""

    visible_end: Tensor | None = None
    """[R, Q] int64: number of leading slots that each column sees."""


@dataclass(kw_only=True)
class RankedQuery(AnyOrderQuery):
    """One call in any order. Its tensors hold the `N` rows of one branch; the model adds the second branch, whose rows
    follow in the store. For each of the first `K <= W` columns of `wanted`, the model evaluates a mask token that sees
    itself and the tokens of lower rank. The model does not evaluate the mask tokens in `tokens`."""

    ranks: Tensor
    """[N, Q] int64: rank of each column in its row's order, prompt first, for decided and undecided columns."""
    is_wanted: Tensor
    """[N, K] bool: False where `wanted` is padding; all columns of `wanted` from K on are padding."""
    scale: Tensor
    """[N, K] float64: guidance scale of each column of `wanted`; unused with one branch."""


@dataclass
class LatentQuery:
    """One call of a continuous model. With two branches, the first N rows are conditional."""

    rows: np.ndarray
    latent: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs by name, each [R, ...], such as class labels."""
    branches: int = 1
    forwarded: np.ndarray | None = None
    """[N] int64, on the host: number of positions (patches) of each row in one branch."""
    kind: str = "full"


@dataclass
class LatentProposal:
    """A continuous model's output for the next step, or its forecast (forecast family)."""

    rows: np.ndarray
    values: Tensor
    """[N, ...] float."""
    cost: Cost
    made_at: int = 0
    """`State.commits` when the proposal was made."""
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

    rows: ids of each row. positions: positions to predict in each row. prompts: prompt length of each row.
    start: first position to evaluate; earlier ones are read from row 0 of a store."""
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
    """Compute the log-probabilities of a prompt's P tokens `ids` under a causal model, and of the `count` likeliest
    tokens at each position. Shapes [1, P] and [1, P, count]; NaN at the first token."""
    parts, size = [], max(1, MAX_LOGITS // model.facts.vocab_size)
    with torch.inference_mode(), weights_lock(model):
        for positions in torch.arange(len(ids)).split(size):
            logits = model(build_rows_query(model, [ids], [positions.tolist()], [len(ids)]))
            tokens = torch.tensor([ids])[:, positions].to(logits.device)
            parts.append(StepLogProbs.from_logits(logits, tokens, count))
    scores = StepLogProbs.combine(parts, lambda tensors: torch.cat(tensors, 1).cpu())
    return scores.fill(torch.arange(len(ids)).unsqueeze(0) == 0)
