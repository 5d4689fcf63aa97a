"""Layout of several drafts of a row in one call: as separate rows, or in one row."""

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
    """Read-only state of a draft: its window `tokens` [R, W] int64, and step counters after `steps` more steps."""

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
        """[B] int64: undecided positions of the block. Computed only when read, since the copy waits for the device."""
        if self.steps and not self._is_counted:
            self._remaining, self._is_counted = self._remaining.copy(), True
            self._remaining[self.window.rows] = self.undecided_window.sum(1).cpu().numpy()
        return self._remaining


@dataclass(kw_only=True)
class DraftLogits(WindowLogits):
    """Logits of a call that evaluates several drafts of its rows. `drafts[0]` is the row itself."""

    drafts: list[DraftState]
    tree: bool = False
    """Whether all drafts of a row are in one row of the call."""


def build_queries(state: MaskedState, drafts: list[DraftState], counts: np.ndarray, tree: bool) -> list[WindowQuery]:
    """Build one query per part of the cache's plan; with a store or `tree`, a second one for rows with a single draft.
    counts: [R] int64, drafts of each row. tree: whether all drafts of a row are in one row of the call."""
    queries: list[WindowQuery] = []
    for part in state.cache.plan(state):
        has_drafts = counts[part.index] > 1
        # calls with drafts do not write to the store, so that rows without drafts need another call
        in_one_call = state.store is None and not tree and has_drafts.any()
        for selected in [has_drafts | True] if in_one_call else [~has_drafts, has_drafts]:
            if not selected.any():
                continue
            query = build_query(state, select_part_rows(part, selected))
            query_drafts = counts[query.window.index]
            if query_drafts.max() == 1:
                queries.append(query)
            elif tree:
                queries.append(to_tree_query(state, query, drafts, query_drafts))
            else:
                queries.append(to_batch_query(state, query, drafts, query_drafts))
    return queries


def logits_by_draft(
    state: MaskedState, base: Any, outputs: list[Tensor], queries: list[WindowQuery], count: int
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Collect the logits of all drafts of all rows. count: K, the largest number of drafts of a row.

    Returns the logits [N, W, V]; the index [K, R] int64 along N of draft k of each row, or of the row's last draft if
    it has fewer; and the number of drafts of each row [R]."""
    num_rows = len(state.window.rows)
    pieces, indices, num_drafts = [], np.zeros((count, num_rows), np.int64), np.ones(num_rows, np.int64)
    total = 0
    for logits, query in zip(outputs, queries, strict=True):
        logits = prepare_logits(base, state, logits, query)
        window = query.window
        query_drafts = np.ones(len(query.rows), np.int64) if window.num_drafts is None else window.num_drafts
        num_drafts[window.index] = query_drafts
        max_drafts = query_drafts.max()
        if isinstance(window, DraftLogits) and window.tree:
            logits = logits.unflatten(1, (max_drafts, -1)).flatten(0, 1)  # all drafts of the first row come first
            offsets = np.arange(max_drafts)[:, None] + max_drafts * np.arange(len(query_drafts))
        else:
            is_draft = np.arange(max_drafts)[:, None] < query_drafts
            offsets = is_draft.cumsum().reshape(is_draft.shape) - 1  # the first drafts of all rows come first
        steps = np.minimum(np.arange(count)[:, None], query_drafts - 1)
        indices[:, window.index] = total + np.take_along_axis(offsets, steps, 0)
        pieces.append(logits)
        total += len(logits)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces), indices, num_drafts


def select_part_rows(part: Part, selected: np.ndarray) -> Part:
    """Restrict a part to its `selected` [N] bool rows."""
    if selected.all():
        return part
    valid = None if part.valid is None else part.valid[selected]
    return dataclasses.replace(part, index=part.index[selected], positions=part.positions[selected], valid=valid)


def to_batch_query(state: MaskedState, query: WindowQuery, drafts: list[DraftState], counts: np.ndarray) -> WindowQuery:
    """Give each draft its own row of the call: the first drafts of all rows, then the second drafts, ..."""
    assert query.wanted is not None and query.forwarded is not None  # `build_query` sets both
    draft_index, query_row = (np.arange(counts.max())[:, None] < counts).nonzero()
    index = np.concatenate([query_row + branch * len(counts) for branch in range(query.branches)])
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
        forwarded=query.forwarded * counts,
        decided_at=None if query.decided_at is None else _decided_steps(state, query, drafts, draft_index, query_row),
        window=DraftLogits(query.window.index, query.window.available, num_drafts=counts, drafts=drafts),
    )


def _decided_steps(
    state: MaskedState, query: WindowQuery, drafts: list[DraftState], draft_index: np.ndarray, query_row: np.ndarray
) -> Tensor:
    """Compute `WindowQuery.decided_at` of drafts `draft_index` [D] of rows `query_row` [D]: [branches * D, Q] int64."""
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


def to_tree_query(state: MaskedState, query: WindowQuery, drafts: list[DraftState], counts: np.ndarray) -> WindowQuery:
    """Put the drafts of a row next to each other in one row of the call. Each draft attends only to itself."""
    assert query.wanted is not None and query.forwarded is not None
    (count, width), device = query.positions.shape, state.canvas.device
    max_drafts = int(counts.max())
    draft_index, query_row = (index.ravel() for index in np.indices((max_drafts, len(counts))))
    tokens = _draft_tokens(state, query, drafts, draft_index, query_row).unflatten(0, (query.branches, max_drafts, -1))
    positions = query.positions.repeat(1, max_drafts)
    column_draft = torch.arange(max_drafts, device=device).repeat_interleave(width)
    visible = (column_draft[:, None] == column_draft).expand(count, -1, -1)
    if state.facts.topology == "block_causal":
        block = state.facts.block_numbers(positions, query.origin)
        visible = visible & (block[:, :, None] >= block[:, None, :])
    valid = None
    if query.valid is not None or (counts < max_drafts).any():
        query_drafts = torch.as_tensor(counts, device=device).repeat(query.branches)
        valid = column_draft < query_drafts[:, None]
        if query.valid is not None:
            valid = valid & query.valid.repeat(1, max_drafts)
    wanted = query.wanted[:, None] + width * torch.arange(max_drafts, device=device)[:, None]
    return query.with_fields(
        tokens=tokens.transpose(1, 2).reshape(count, max_drafts * width),
        positions=positions,
        wanted=wanted.flatten(1),
        valid=valid,
        visible=visible,
        store=None if query.store is None else query.store.with_fields(slots=None),
        forwarded=query.forwarded * counts,
        window=DraftLogits(query.window.index, query.window.available, num_drafts=counts, drafts=drafts, tree=True),
    )


def _draft_tokens(
    state: MaskedState, query: WindowQuery, drafts: list[DraftState], draft_index: np.ndarray, query_row: np.ndarray
) -> Tensor:
    """Gather the tokens of drafts `draft_index` [D] of rows `query_row` [D] at a query's Q positions, per branch."""
    device, window = state.canvas.device, state.window
    running = torch.as_tensor(query.window.index[query_row], device=device)
    rows = torch.as_tensor(query.rows[query_row], device=device)
    tokens = torch.stack([draft.tokens for draft in drafts])[torch.as_tensor(draft_index, device=device), running]
    canvas = state.canvas.index_select(0, rows).scatter(1, window.positions[running], tokens)
    branches = [canvas]
    if query.branches == 2:
        branches.append(canvas.masked_fill(state.is_prompt[rows], state.facts.mask_id))
    positions = query.positions[: len(query.rows)][torch.as_tensor(query_row, device=device)]
    return torch.cat([branch.gather(1, positions) for branch in branches])
