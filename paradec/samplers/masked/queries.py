"""The model calls of a step: one query for each part of the cache's plan."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.caches.stored import StoredCache
from paradec.core.contract import CanvasState
from paradec.core.query import StoreCall, WindowLogits, WindowQuery
from paradec.samplers.masked.state import MaskedState

SPARED = 2**15
"""Logits that a call has to be spared before it is asked for undecided positions alone: what choosing these costs."""


def part_query(state: MaskedState, part: Part) -> WindowQuery:
    """The model call of one part of the plan. What does not change from step to step is made once."""
    if part.lasts:
        key = ("query", part.kind, part.index.tobytes(), part.positions.tobytes())
        query, row_index, whole = state.while_blocks_stay(key, lambda: _query_of_blocks(state, part, key))
    else:
        query, row_index, whole = _fixed_query(state, part)
        query.wanted, query.window.available = _wanted(state, part)
    now: dict[str, Any] = {}
    if query.store is not None:
        now["store"] = query.store.but(step=state.commits)
    for feature in state.features.values():
        feature.on_query(state, part, query, now)
    if query.branches == 2 or not whole:  # else its tokens are the canvas itself
        now["tokens"] = tokens = tokens_of(state.canvas, query, row_index)
        if query.branches == 2:
            given = tokens_of(state.given, query, row_index)
            now["tokens"] = torch.cat((tokens, tokens.masked_fill(given, state.facts.mask_id)))
    return query.but(**now) if now else query


def reads_window(sampler: Any, state: MaskedState) -> bool:
    """Whether this step reads the logits of decided positions as well: the method, or something else that has more to
    do with them than to choose candidates."""
    needs = sampler.needs
    own: bool = needs.decided_logits or needs.revises or needs.processes_logits
    own = own or needs.extra_quantities or needs.mask_probes or needs.multi_step
    for feature in state.features.values():
        own = own or feature.reads_window(state)
    return own


def undecided_alone(state: MaskedState, query: WindowQuery) -> WindowQuery:
    """The query without the logits of decided positions: as many columns as the row with the most undecided ones has;
    the others' are filled up with decided ones. It stays as it is where that spares little."""
    assert query.wanted is not None
    window = state.window
    width = window.positions.shape[1]
    multiple = state.cache.shape_multiple if state.store is not None and isinstance(state.cache, StoredCache) else 1
    most = -(-int(state.remaining[query.rows].max()) // multiple) * multiple
    if (width - most) * len(query.wanted) * state.facts.vocab_size < SPARED:
        return query
    undecided = window.undecided(window.read(state.canvas), state.mask_id)
    if len(query.rows) < len(undecided):
        undecided = undecided[torch.as_tensor(query.window.index, device=undecided.device)]
    columns = undecided.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    both = columns.repeat(query.branches, 1) if query.branches > 1 else columns
    return query.but(wanted=query.wanted.gather(1, both), window=query.window.but(columns=columns))


def positions_of(state: CanvasState, query: WindowQuery) -> Tensor:
    """[N, K] int64: the positions that a query's logits [N, K, V] are for."""
    positions = state.window.positions
    positions = positions[torch.as_tensor(query.window.index, device=positions.device)]
    return positions if query.window.columns is None else positions.gather(1, query.window.columns)


def tokens_of(tensor: Tensor, query: WindowQuery, row_index: Tensor) -> Tensor:
    """What a canvas-shaped tensor [B, L] holds at a query's positions: [N, Q]. row_index: [N] int64."""
    rows = tensor.index_select(0, row_index)
    own = query.positions[: len(query.rows)]
    return rows.narrow(1, 0, own.shape[1]) if query.kind == "full" else rows.gather(1, own)


def _query_of_blocks(state: MaskedState, part: Part, key: Any) -> tuple[WindowQuery, Tensor, bool]:
    """The query as long as the blocks are the same: everything but its tokens."""
    # whole rows stay what they are while blocks move
    keep = state.while_rows_stay if part.kind == "full" else state.while_blocks_stay
    fixed, row_index, whole = keep(("fixed", key), functools.partial(_fixed_query, state, part))
    wanted, available = _wanted(state, part)
    window = fixed.window if available is None else fixed.window.but(available=available)
    return fixed.but(wanted=wanted, window=window), row_index, whole


def _fixed_query(state: MaskedState, part: Part) -> tuple[WindowQuery, Tensor, bool]:
    """The query without its tokens and wanted columns, the rows' index [N], and whether it is the canvas itself."""
    device, rows = state.canvas.device, state.window.rows[part.index]
    row_index = torch.as_tensor(rows, device=device)
    query = WindowQuery(
        rows=rows,
        tokens=state.canvas,
        positions=per_branch(state, part.positions),
        valid=None if part.valid is None else per_branch(state, part.valid),
        branches=state.branches,
        forwarded=part.sizes,
        kind=part.kind,
        window=WindowLogits(part.index),
    )
    if state.facts.prompt_aligned:
        query.origin = per_branch(state, state.prompt_length[rows, None])
    if state.store is not None:
        index = np.concatenate([rows + branch * state.batch for branch in range(state.branches)])
        slots = query.positions if part.valid is None else per_branch(state, np.where(part.valid, part.positions, -1))
        # no row sees beyond its end, nor, in a block-causal model, beyond the last block that it evaluates
        length = state.length[rows]
        if state.present is not None:  # up to the last position that exists for now
            length = np.minimum(length, state.canvas.shape[1] - state.present[rows][:, ::-1].argmax(1))
        visible = int(length.max())
        if state.facts.topology == "block_causal":
            last = part.positions.max(1)
            visible = min(visible, int(state.facts.block_bounds(last, last + 1, state.prompt_length[rows])[1].max()))
        visible += -visible % state.stored_cache.shape_multiple
        query.store = StoreCall(torch.as_tensor(index, device=device), slots, index, visible)
    whole = part.valid is None and len(rows) == state.batch and part.positions.shape == tuple(state.canvas.shape)
    return query, row_index, whole


def _wanted(state: MaskedState, part: Part) -> tuple[Tensor, Tensor | None]:
    """Columns of the call [R, W] that hold the window's logits, and which of them are there [N, W] (None: all)."""
    source = state.window.host_positions
    if len(part.index) < len(source):
        source = source[part.index]
    if state.facts.shift:  # logits are one position to the left; position 0 has no left neighbour and uses its own
        source = np.maximum(source - state.facts.shift, 0)
    if part.kind == "full":
        if source is state.window.host_positions and state.branches == 1 and state.window.host_valid is None:
            return state.window.positions, None
        if state.window.host_valid is not None:  # padding of the window may ask beyond the row
            source = np.minimum(source, part.positions.shape[1] - 1)
        return per_branch(state, source), None
    # the column of each position in this call, -1 where it is not evaluated
    column = np.full((len(part.index), state.canvas.shape[1]), -1)
    row, at = np.ones_like(part.positions).nonzero() if part.valid is None else part.valid.nonzero()
    column[row, part.positions[row, at]] = at
    source = np.take_along_axis(column, source, axis=1)
    there = source >= 0
    available = None if there.all() else torch.as_tensor(there, device=state.canvas.device)
    return per_branch(state, np.maximum(source, 0)), available


def per_branch(state: MaskedState, array: np.ndarray) -> Tensor:
    """[N, ...] on the host -> [branches * N, ...] on the device."""
    tensor = torch.as_tensor(array, device=state.canvas.device)
    return torch.cat((tensor, tensor)) if state.branches == 2 else tensor


def owners(query: WindowQuery, count: int) -> np.ndarray:
    """[count] int64: the state's row of each row of logits that answer a query; drafts may have rows of their own."""
    if query.window.copies is None or count == len(query.rows):
        return query.rows
    _, owner = (np.arange(query.window.copies.max())[:, None] < query.window.copies).nonzero()
    rows: np.ndarray = query.rows[owner]
    return rows
