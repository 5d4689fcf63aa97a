"""Drafts of later steps in one call: how they are arranged in it, as rows of their own or one after the other in a
row."""

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
from paradec.samplers.masked.loop import build_query, guide
from paradec.samplers.masked.state import MaskedState


class Ahead(MaskedState):
    """A state as its sampler would find it some steps on, if a draft is right: what counts steps is moved on, and
    all else is the state's own. To be read only.

    Args:
        state: the state as it is.
        steps: how many steps later.
        tokens: [R, W] int64, the window then.
    """

    def __init__(self, state: MaskedState, steps: int, tokens: Tensor):
        self.__dict__.update(state.__dict__)
        self.steps, self.tokens = steps, tokens
        self._now = state.remaining
        self._steps = state._steps + steps
        self.block_step, self.row_step = self._steps

    @functools.cached_property
    def candidates(self) -> Tensor:
        """[R, W] bool: undecided positions."""
        return self.window.undecided(self.tokens, self.mask_id)

    @functools.cached_property
    def _left(self) -> np.ndarray:
        remaining = self._now.copy()
        remaining[self.window.rows] = self.candidates.sum(1).cpu().numpy()
        return remaining

    @property
    def remaining(self) -> np.ndarray:  # type: ignore[override]
        """[B] int64: undecided positions of the block. Waits for the device: only schedules that count them ask."""
        return self._left if self.steps else self._now


@dataclass(kw_only=True)
class DraftLogits(WindowLogits):
    """The logits of a call that evaluates several drafts of its rows. `drafts[j]` is what the base would find j steps
    on."""

    drafts: list[Ahead]
    tree: bool = False
    """Whether a row's drafts are in one row of the call, not in rows of their own."""


def draft_queries(state: MaskedState, drafts: list[Ahead], copies: np.ndarray, tree: bool) -> list[WindowQuery]:
    """One query per part of the cache's plan, two where only some of its rows have drafts beside the first one.

    Args:
        copies: [R] int64, how many of the drafts each row has.
        tree: whether a row's drafts are in one row of the call.
    """
    queries: list[WindowQuery] = []
    for part in state.cache.plan(state):
        several = copies[part.index] > 1
        # what is evaluated once is written to the store as the base would write it; drafts are not
        together = state.store is None and not tree and several.any()
        for chosen in [several | True] if together else [~several, several]:
            if not chosen.any():
                continue
            query = build_query(state, rows_of_part(part, chosen))
            number = copies[query.window.index]
            if number.max() == 1:
                queries.append(query)
            elif tree:
                queries.append(tree_query(state, query, drafts, number))
            else:
                queries.append(batch_query(state, query, drafts, number))
    return queries


def logits_by_draft(
    state: MaskedState, base: Any, outputs: list[Tensor], queries: list[WindowQuery], count: int
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """All logits [N, W, V], where those of each draft are in them [K, R] int64, and drafts per row [R] int64.

    A row's drafts that were not evaluated point to its last one that was.
    """
    running = len(state.window.rows)
    found, at, copies = [], np.zeros((count, running), np.int64), np.ones(running, np.int64)
    total = 0
    for logits, query in zip(outputs, queries, strict=True):
        logits = guide(base, state, logits, query)
        own = query.window
        number = np.ones(len(query.rows), np.int64) if own.copies is None else own.copies
        copies[own.index] = number
        most = number.max()
        if isinstance(own, DraftLogits) and own.tree:
            logits = logits.unflatten(1, (most, -1)).flatten(0, 1)  # a row's drafts one after the other
            place = np.arange(most)[:, None] + most * np.arange(len(number))
        else:
            present = np.arange(most)[:, None] < number
            place = present.cumsum().reshape(present.shape) - 1  # a draft of all rows after the other
        steps = np.minimum(np.arange(count)[:, None], number - 1)
        at[:, own.index] = total + np.take_along_axis(place, steps, 0)
        found.append(logits)
        total += len(logits)
    return found[0] if len(found) == 1 else torch.cat(found), at, copies


def rows_of_part(part: Part, chosen: np.ndarray) -> Part:
    """The part with only the `chosen` [N] bool of its rows."""
    if chosen.all():
        return part
    valid = None if part.valid is None else part.valid[chosen]
    return dataclasses.replace(part, index=part.index[chosen], positions=part.positions[chosen], valid=valid)


def batch_query(state: MaskedState, query: WindowQuery, drafts: list[Ahead], copies: np.ndarray) -> WindowQuery:
    """A call in which every draft has a row: the first of all rows, then the second of those that have one, ..."""
    assert query.wanted is not None and query.forwarded is not None  # as `build_query` makes it
    step, owner = (np.arange(copies.max())[:, None] < copies).nonzero()
    index = np.concatenate([owner + branch * len(copies) for branch in range(query.branches)])
    called = torch.as_tensor(index, device=state.canvas.device)
    store = query.store
    if store is not None:
        assert store.index is not None
        store = store.with_fields(rows=store.rows[called], index=store.index[index], slots=None)
    return query.with_fields(
        tokens=_tokens_of(state, query, drafts, step, owner),
        positions=query.positions[called],
        wanted=query.wanted[called],
        valid=None if query.valid is None else query.valid[called],
        origin=None if query.origin is None else query.origin[called],
        store=store,
        forwarded=query.forwarded * copies,
        decided_at=None if query.decided_at is None else _decided_at(state, query, drafts, step, owner),
        window=DraftLogits(query.window.index, query.window.available, copies=copies, drafts=drafts),
    )


def _decided_at(
    state: MaskedState, query: WindowQuery, drafts: list[Ahead], step: np.ndarray, owner: np.ndarray
) -> Tensor:
    """[branches * D, Q] int64: `WindowQuery.decided_at` of D drafts. What a draft holds and the one before it does
    not was decided between them."""
    order: Any = state.features["decision_order"]
    window, found = state.window, []
    when = window.read(order.decided_at)
    row_step = torch.as_tensor(state.row_step[window.rows, None], device=when.device)
    for number, ahead in enumerate(drafts):
        if number:
            when = torch.where(ahead.tokens != drafts[number - 1].tokens, row_step + number - 1, when)
        found.append(when)
    device = state.canvas.device
    running = torch.as_tensor(query.window.index[owner], device=device)
    rows = torch.as_tensor(query.rows[owner], device=device)
    own = torch.stack(found)[torch.as_tensor(step, device=device), running]
    whole = order.decided_at.index_select(0, rows).scatter(1, window.positions[running], own)
    positions = query.positions[: len(query.rows)][torch.as_tensor(owner, device=device)]
    return whole.gather(1, positions).repeat(query.branches, 1)


def tree_query(state: MaskedState, query: WindowQuery, drafts: list[Ahead], copies: np.ndarray) -> WindowQuery:
    """A call in which the drafts of a row are one after the other in its row, each seeing itself alone."""
    assert query.wanted is not None and query.forwarded is not None
    (count, width), device = query.positions.shape, state.canvas.device
    most = int(copies.max())
    step, owner = (index.ravel() for index in np.indices((most, len(copies))))
    tokens = _tokens_of(state, query, drafts, step, owner).unflatten(0, (query.branches, most, -1))
    positions = query.positions.repeat(1, most)
    number = torch.arange(most, device=device).repeat_interleave(width)
    visible = (number[:, None] == number).expand(count, -1, -1)
    if state.facts.topology == "block_causal":
        block = state.facts.block_numbers(positions, query.origin)
        visible = visible & (block[:, :, None] >= block[:, None, :])
    valid = None
    if query.valid is not None or (copies < most).any():
        own = torch.as_tensor(copies, device=device).repeat(query.branches)
        valid = number < own[:, None]
        if query.valid is not None:
            valid = valid & query.valid.repeat(1, most)
    wanted = query.wanted[:, None] + width * torch.arange(most, device=device)[:, None]
    return query.with_fields(
        tokens=tokens.transpose(1, 2).reshape(count, most * width),
        positions=positions,
        wanted=wanted.flatten(1),
        valid=valid,
        visible=visible,
        store=None if query.store is None else query.store.with_fields(slots=None),
        forwarded=query.forwarded * copies,
        window=DraftLogits(query.window.index, query.window.available, copies=copies, drafts=drafts, tree=True),
    )


def _tokens_of(
    state: MaskedState, query: WindowQuery, drafts: list[Ahead], step: np.ndarray, owner: np.ndarray
) -> Tensor:
    """[branches * D, Q] int64: what D drafts hold at a query's positions. step, owner: [D], the draft's number and the
    query's row that it is of."""
    device, window = state.canvas.device, state.window
    running = torch.as_tensor(query.window.index[owner], device=device)
    rows = torch.as_tensor(query.rows[owner], device=device)
    own = torch.stack([ahead.tokens for ahead in drafts])[torch.as_tensor(step, device=device), running]
    canvas = state.canvas.index_select(0, rows).scatter(1, window.positions[running], own)
    branches = [canvas]
    if query.branches == 2:
        branches.append(canvas.masked_fill(state.given[rows], state.facts.mask_id))
    positions = query.positions[: len(query.rows)][torch.as_tensor(owner, device=device)]
    return torch.cat([branch.gather(1, positions) for branch in branches])
