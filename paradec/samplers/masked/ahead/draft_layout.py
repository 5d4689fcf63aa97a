"""Drafts of later steps in one call, as separate rows or in one row."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.core.query import WindowLogits, WindowQuery
from paradec.samplers.masked.loop import build_query, prepare_logits
from paradec.samplers.masked.state import MaskedState


class DraftState(MaskedState):
    """Read-only state after `steps` more steps: the draft's window `tokens` [R, W] int64, and later step counters."""

    def __init__(self, state: MaskedState, steps: int, tokens: Tensor):
        self.__dict__.update(state.__dict__)
        self.steps, self.tokens = steps, tokens
        self._remaining, self._is_counted = state.remaining, False
        self._steps = state._steps + steps
        self.block_step, self.row_step = self._steps

    @functools.cached_property
    def undecided_window(self) -> Tensor:
        return self.window.undecided(self.tokens, self.mask_id)

    @property
    def remaining(self) -> np.ndarray:  # type: ignore[override]
        """[B] int64: undecided positions of the block. Waits for the device, so only schedules that need it read it."""
        if self.steps and not self._is_counted:
            self._remaining, self._is_counted = self._remaining.copy(), True
            self._remaining[self.window.rows] = self.undecided_window.sum(1).cpu().numpy()
        return self._remaining


@dataclass(kw_only=True)
class DraftLogits(WindowLogits):
    """Logits of a call that evaluates several drafts of its rows. `drafts[j]` is the state after j more steps."""

    drafts: list[DraftState]
    tree: bool = False
    """Whether a row's drafts are in one row of the call."""


def build_queries(state: MaskedState, drafts: list[DraftState], copies: np.ndarray, tree: bool) -> list[WindowQuery]:
    """Build one query per part of the cache's plan, or two if only some of its rows have several drafts. copies: [R]
    int64, drafts of each row. tree: whether a row's drafts are in one row of the call."""
    queries: list[WindowQuery] = []
    for part in state.cache.plan(state):
        has_drafts = copies[part.index] > 1
        # rows without drafts write to the store, as with the base; rows with drafts do not
        in_one_call = state.store is None and not tree and has_drafts.any()
        for chosen in [has_drafts | True] if in_one_call else [~has_drafts, has_drafts]:
            if not chosen.any():
                continue
            query = build_query(state, select_part_rows(part, chosen))
            num_drafts = copies[query.window.index]
            if num_drafts.max() == 1:
                queries.append(query)
            elif tree:
                queries.append(to_tree_query(state, query, drafts, num_drafts))
            else:
                queries.append(to_batch_query(state, query, drafts, num_drafts))
    return queries


def logits_by_draft(
    state: MaskedState, base: Any, outputs: list[Tensor], queries: list[WindowQuery], count: int
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Collect logits [N, W, V], indices of drafts in them [K, R] (missing: the row's last), and drafts per row [R]."""
    running = len(state.window.rows)
    pieces, indices, copies = [], np.zeros((count, running), np.int64), np.ones(running, np.int64)
    total = 0
    for logits, query in zip(outputs, queries, strict=True):
        logits = prepare_logits(base, state, logits, query)
        window = query.window
        num_drafts = np.ones(len(query.rows), np.int64) if window.copies is None else window.copies
        copies[window.index] = num_drafts
        max_copies = num_drafts.max()
        if isinstance(window, DraftLogits) and window.tree:
            logits = logits.unflatten(1, (max_copies, -1)).flatten(0, 1)  # row by row
            offsets = np.arange(max_copies)[:, None] + max_copies * np.arange(len(num_drafts))
        else:
            present = np.arange(max_copies)[:, None] < num_drafts
            offsets = present.cumsum().reshape(present.shape) - 1  # draft by draft
        steps = np.minimum(np.arange(count)[:, None], num_drafts - 1)
        indices[:, window.index] = total + np.take_along_axis(offsets, steps, 0)
        pieces.append(logits)
        total += len(logits)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces), indices, copies


def select_part_rows(part: Part, chosen: np.ndarray) -> Part:
    """Restrict a part to its `chosen` [N] bool rows."""
    if chosen.all():
        return part
    valid = None if part.valid is None else part.valid[chosen]
    return dataclasses.replace(part, index=part.index[chosen], positions=part.positions[chosen], valid=valid)


def to_batch_query(state: MaskedState, query: WindowQuery, drafts: list[DraftState], copies: np.ndarray) -> WindowQuery:
    """Give each draft its own row of the call: the first drafts of all rows, then the second drafts, ..."""
    assert query.wanted is not None and query.forwarded is not None  # `build_query` sets both
    draft_index, query_row = (np.arange(copies.max())[:, None] < copies).nonzero()
    index = np.concatenate([query_row + branch * len(copies) for branch in range(query.branches)])
    call_rows = torch.as_tensor(index, device=state.canvas.device)
    store = query.store
    if store is not None:
        assert store.index is not None
        store = store.with_fields(rows=store.rows[call_rows], index=store.index[index], slots=None)
    return query.with_fields(
        tokens=_draft_tokens(state, query, drafts, draft_index, query_row),
        positions=query.positions[call_rows],
        wanted=query.wanted[call_rows],
        valid=None if query.valid is None else query.valid[call_rows],
        origin=None if query.origin is None else query.origin[call_rows],
        store=store,
        forwarded=query.forwarded * copies,
        decided_at=None if query.decided_at is None else _decided_steps(state, query, drafts, draft_index, query_row),
        window=DraftLogits(query.window.index, query.window.available, copies=copies, drafts=drafts),
    )


def _decided_steps(
    state: MaskedState, query: WindowQuery, drafts: list[DraftState], draft_index: np.ndarray, query_row: np.ndarray
) -> Tensor:
    """Compute `WindowQuery.decided_at` of D drafts: [branches * D, Q] int64."""
    order: Any = state.features["decision_order"]
    window, steps_by_draft = state.window, []
    decided_at = window.read(order.decided_at)
    row_step = torch.as_tensor(state.row_step[window.rows, None], device=decided_at.device)
    for number, draft in enumerate(drafts):
        if number:
            decided_at = torch.where(draft.tokens != drafts[number - 1].tokens, row_step + number - 1, decided_at)
        steps_by_draft.append(decided_at)
    device = state.canvas.device
    running = torch.as_tensor(query.window.index[query_row], device=device)
    rows = torch.as_tensor(query.rows[query_row], device=device)
    window_steps = torch.stack(steps_by_draft)[torch.as_tensor(draft_index, device=device), running]
    canvas_steps = order.decided_at.index_select(0, rows).scatter(1, window.positions[running], window_steps)
    positions = query.positions[: len(query.rows)][torch.as_tensor(query_row, device=device)]
    return canvas_steps.gather(1, positions).repeat(query.branches, 1)


def to_tree_query(state: MaskedState, query: WindowQuery, drafts: list[DraftState], copies: np.ndarray) -> WindowQuery:
    """Put the drafts of a row next to each other in one row of the call; each attends only to itself."""
    assert query.wanted is not None and query.forwarded is not None
    (count, width), device = query.positions.shape, state.canvas.device
    max_copies = int(copies.max())
    draft_index, query_row = (index.ravel() for index in np.indices((max_copies, len(copies))))
    tokens = _draft_tokens(state, query, drafts, draft_index, query_row).unflatten(0, (query.branches, max_copies, -1))
    positions = query.positions.repeat(1, max_copies)
    column_draft = torch.arange(max_copies, device=device).repeat_interleave(width)
    visible = (column_draft[:, None] == column_draft).expand(count, -1, -1)
    if state.facts.topology == "block_causal":
        block = state.facts.block_numbers(positions, query.origin)
        visible = visible & (block[:, :, None] >= block[:, None, :])
    valid = None
    if query.valid is not None or (copies < max_copies).any():
        num_drafts = torch.as_tensor(copies, device=device).repeat(query.branches)
        valid = column_draft < num_drafts[:, None]
        if query.valid is not None:
            valid = valid & query.valid.repeat(1, max_copies)
    wanted = query.wanted[:, None] + width * torch.arange(max_copies, device=device)[:, None]
    return query.with_fields(
        tokens=tokens.transpose(1, 2).reshape(count, max_copies * width),
        positions=positions,
        wanted=wanted.flatten(1),
        valid=valid,
        visible=visible,
        store=None if query.store is None else query.store.with_fields(slots=None),
        forwarded=query.forwarded * copies,
        window=DraftLogits(query.window.index, query.window.available, copies=copies, drafts=drafts, tree=True),
    )


def _draft_tokens(
    state: MaskedState, query: WindowQuery, drafts: list[DraftState], draft_index: np.ndarray, query_row: np.ndarray
) -> Tensor:
    """Gather the tokens of D drafts, of rows `query_row` [D], at a query's positions: [branches * D, Q] int64."""
    device, window = state.canvas.device, state.window
    running = torch.as_tensor(query.window.index[query_row], device=device)
    rows = torch.as_tensor(query.rows[query_row], device=device)
    tokens = torch.stack([draft.tokens for draft in drafts])[torch.as_tensor(draft_index, device=device), running]
    canvas = state.canvas.index_select(0, rows).scatter(1, window.positions[running], tokens)
    branches = [canvas]
    if query.branches == 2:
        branches.append(canvas.masked_fill(state.given[rows], state.facts.mask_id))
    positions = query.positions[: len(query.rows)][torch.as_tensor(query_row, device=device)]
    return torch.cat([branch.gather(1, positions) for branch in branches])
