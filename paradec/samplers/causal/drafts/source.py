"""Sources of drafts: the interface, and functions that run a drafter model. A source writes drafts of windows [R, W] or
trees [R, N], and their distributions q, into the state's memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import CausalQuery
from paradec.core.query import Cost
from paradec.samplers.causal.state import CausalState, Drafting, read_logits
from paradec.samplers.causal.window import ONE_HOT


class DraftSource(Protocol):
    """Source of drafts for the next windows or trees of rows."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """Draft for rows [R], each with space for at least one draft.

        features: [branches * R, F, D]: the model's hidden states (of size D) before F final tokens, from the first
            token that the drafter has not read; None for drafters that read no hidden states."""


def record_nan_rows(drafting: Drafting, rows: np.ndarray, q: Tensor) -> Tensor:
    """Record rows with NaN in the drafter's distributions q [R, ..., V] for the next commit; return q unchanged."""
    broken = q[..., 0].isnan().flatten(1).any(1)
    if drafting.broken is None:
        drafting.broken = torch.zeros(len(drafting.nfe), dtype=torch.bool, device=q.device)
    index = torch.as_tensor(rows, device=q.device)
    drafting.broken = drafting.broken.index_copy(0, index, drafting.broken[index] | broken)
    return q


def exclude_tokens(
    state: CausalState,
    logits: Tensor,
    rows: np.ndarray,
    parents: Tensor,
    tokens: Tensor,
    nodes: Sequence[int] | np.ndarray,
) -> Tensor:
    """Set logits [R, K, V] after K nodes of the rows' trees to -inf for tokens that may not be drawn (arguments as for
    `CausalConstraint.mask_nodes`). If the drafter's own vocabulary or candidates contain no allowed token, all allowed
    tokens become equally likely."""
    constraint, allowed = state.constraint, state.allowed
    if constraint is None and (allowed is None or getattr(state.drafting.model, "tokens", None) is None):
        return logits

    def restrict(logits: Tensor) -> Tensor:
        if constraint is not None:
            logits = constraint.mask_nodes(state, logits, rows, parents, tokens, nodes)
        return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)

    restricted = restrict(logits)
    is_empty = (restricted == -torch.inf).all(-1, keepdim=True)
    if constraint is not None and not is_empty.any():  # constraints synchronise with the host in any case
        return restricted
    return torch.where(is_empty, restrict(torch.zeros_like(logits)), restricted)


def write_drafts(state: CausalState, rows: np.ndarray, drafts: Tensor, q: Tensor | None) -> None:
    """Write drafts [R, n] into the first slots of the rows' windows. q: [R, n, V]: the distributions of the drafts;
    None: one-hot."""
    padding = state.width - drafts.shape[1]
    source = torch.arange(state.width, device=drafts.device).expand(len(rows), -1)
    state.memory.write("drafts", rows, torch.nn.functional.pad(drafts, (0, padding)))
    state.memory.write("draft_source", rows, torch.full_like(source, ONE_HOT) if q is None else source)
    if q is not None:
        state.memory.write("draft_distribution", rows, torch.nn.functional.pad(q, (0, 0, 0, padding)))


def num_drafts_left(state: CausalState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: number of drafts of each row that can become final."""
    return state.end[rows] - state.committed[rows] - 1


def soften_state(state: CausalState) -> CausalState:
    """Return the state with temperature 1 if it is 0: a one-hot distribution has no second token."""
    if state.request.temperature:
        return state
    soft = copy.copy(state)
    soft.request = dataclasses.replace(state.request, temperature=1.0)
    return soft


def right_align(features: Tensor, counts: np.ndarray, width: int) -> Tensor:
    """Right-align the first `counts` [R] of features [R, F, D]: [R, width, D]."""
    column = np.maximum(np.arange(width) - (width - counts)[:, None], 0)
    return features.take_along_dim(torch.as_tensor(column, device=features.device).unsqueeze(-1), 1)


def run_drafter(state: CausalState, queries: list[CausalQuery]) -> Tensor:
    """Run the drafter on queries; return its guided logits."""
    drafting = state.drafting
    with torch.no_grad():
        store = () if drafting.store is None else (drafting.store,)
        outputs = [drafting.model(query, *store) for query in queries]
    drafting.nfe += Cost(queries, state.batch).nfe
    return read_logits(state, outputs, queries)


def unread_span(state: CausalState, rows: np.ndarray, reads_features: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of the first final token that the drafter has not read, and the end of the final tokens,
    [branches, R] int64 each. Drafters of hidden states skip token 0, before which there is no hidden state."""
    num_read, shift = state.drafting.num_read[rows], state.shift[:, rows]
    return np.where(num_read > 0, num_read + shift, int(reads_features)), state.committed[rows] + shift


def run_drafter_on_tree(
    state: CausalState,
    query: CausalQuery,
    num_drafts: int,
    num_new: np.ndarray,
    features: Tensor | None,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return guided logits of the W wanted nodes. Drafters of features also return hidden states [branches * R, W, D].

    num_drafts: number of drafts in the query. num_new: [branches, R]: number of final tokens in the query.
    features: see `DraftSource.fill`. hidden: [branches * R, N, D]: hidden states at each node's parent."""
    if features is None or hidden is None:
        return run_drafter(state, [query]), None
    drafting = state.drafting
    context = right_align(features, num_new.reshape(-1), query.tokens.shape[1] - num_drafts)
    logits, output = drafting.model(query, torch.cat((context, hidden[:, 1 : num_drafts + 1]), 1), drafting.store)
    drafting.nfe += Cost([query], state.batch).nfe
    return read_logits(state, [logits], [query]), output
