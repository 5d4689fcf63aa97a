"""Drafts of a whole window in one forward of the drafter (DFlash, `paradec.models.dflash`).

The drafter reads the model's hidden states of the new final tokens and stores their keys and values. In the same call
it reads the last final token and the masks after it, which are not stored. `DraftBlock` draws each draft independently
from its mask's logits, `DraftWalk` from left to right. The drafts are verified like any chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import CausalQuery
from paradec.core.query import Cost, StoreCall
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.drafts.source import exclude_tokens, record_nan_rows, right_align, write_drafts
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState, read_logits


@dataclass(frozen=True)
class DraftBlock:
    """Source: one forward of the drafter fills a window of masks."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        drafting = state.drafting
        drafter: Any = drafting.model
        assert features is not None  # drafters of blocks read hidden states
        query, num_new = query_block(state, drafting.num_read[rows], rows, drafter.block_size, drafter.mask_token_id)
        width = query.tokens.shape[1] - drafter.block_size
        context = right_align(features, num_new, width)
        with torch.no_grad():
            output = drafter(query, context, drafting.store)
        drafting.nfe += Cost([query], state.batch).nfe
        drafting.num_read[rows] = state.committed[rows] - 1
        positions = state.positions(rows)[:, :-1]
        drafts, q = self._draw(state, rows, positions, output[:, : state.width - 1], query)
        write_drafts(state, rows, drafts, q)

    def _draw(
        self, state: CausalState, rows: np.ndarray, positions: Tensor, output: Tensor, query: CausalQuery
    ) -> tuple[Tensor, Tensor]:
        """Draw drafts [R, n] at positions [R, n] from the drafter's output; also return q [R, n, V]."""
        logits = read_logits(state, [output], [query])
        if state.constraint is not None:
            return draft_in_order(state, rows, positions, lambda slot, _: logits[:, slot])
        q = record_nan_rows(state.drafting, rows, state.distribution(logits, rows, positions))
        return draw(q, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)), q


def draft_in_order(
    state: CausalState,
    rows: np.ndarray,
    positions: Tensor,
    logits: Callable[[int, Tensor], Tensor],
    candidates: Callable[[int], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draft tokens [R, n] at positions [R, n] from left to right; also return their q [R, n, V].

    logits: called with a slot and the tokens [R] before it; returns [R, V].
    candidates: called with a slot; returns the ids [R, K] whose logits are finite, or None for the whole vocabulary.
    """
    drafting, device = state.drafting, positions.device
    last_position = torch.as_tensor(state.committed[rows] - 1 + state.shift[0, rows], device=device)
    token = state.context[torch.as_tensor(rows, device=device), last_position]
    uniform = state.uniform(rows, positions, 1, DRAFT_STREAM)
    drafts, all_q = positions[:, :0], []
    for slot in range(positions.shape[1]):
        slot_logits = logits(slot, token).unsqueeze(1)
        previous, parents = torch.nn.functional.pad(drafts, (1, 0)), torch.arange(-1, slot).unsqueeze(0)
        slot_logits = exclude_tokens(state, slot_logits, rows, parents, previous, [slot])
        q = state.distribution(slot_logits, rows, positions[:, slot : slot + 1])
        use_vocabulary = candidates is None or state.has_prescribed_tokens or state.constraint is not None
        ids = None if use_vocabulary or candidates is None else candidates(slot)
        if ids is None:
            token = draw(q, uniform[:, slot]).squeeze(1)
        else:  # draw in the order of the candidates; q is 0 for all other ids
            column = draw(q.squeeze(1).gather(1, ids).unsqueeze(1), uniform[:, slot])
            token = ids.gather(1, column).squeeze(1)
        drafts = torch.cat((drafts, token.unsqueeze(1)), 1)
        all_q.append(q)
    return drafts, record_nan_rows(drafting, rows, torch.cat(all_q, 1))


def query_block(
    state: CausalState, num_read: np.ndarray, rows: np.ndarray, size: int, mask_token_id: int
) -> tuple[CausalQuery, np.ndarray]:
    """Make the query of unread final tokens, right-aligned, and then of a block: the last final token and masks.

    num_read: [R] int64: number of final tokens that the drafter has read. size: number of columns of the block.
    Returns the query, and [branches * R] int64: number of unread tokens in each row of the call."""
    device, shift = state.context.device, state.shift[:, rows]
    begin = np.where(num_read > 0, num_read + shift, 0).reshape(-1)
    last_position = (state.committed[rows] - 1 + shift).reshape(-1)  # of the last final token
    num_new = last_position - begin
    width = int(num_new.max())
    position = last_position[:, None] - width + np.arange(width + size)
    is_new = (position >= begin[:, None]) & (position < last_position[:, None])
    store_rows = state.context_rows(rows)
    row_index = torch.as_tensor(store_rows, device=device)
    positions = torch.as_tensor(np.maximum(position, 0), device=device)
    final_positions = positions[:, : width + 1].clamp(max=state.context.shape[1] - 1)
    masks = torch.full((len(last_position), size - 1), mask_token_id, device=device)
    valid = torch.as_tensor(is_new | (position >= last_position[:, None]), device=device)
    slots = torch.as_tensor(np.where(is_new, position, -1), device=device)
    query = CausalQuery(
        rows=rows,
        tokens=torch.cat((state.context[row_index.unsqueeze(1), final_positions], masks), 1),
        positions=positions,
        valid=valid,
        visible=valid.unsqueeze(1).expand(-1, width + size, -1),
        store=StoreCall(row_index, slots, store_rows, int(begin.max()), step=state.commits),
        branches=state.branches,
        forwarded=num_new[: len(rows)] + size,
        index=np.arange(len(rows)),
        kind="window" if begin.any() else "full",
    )
    return query, num_new


@dataclass(frozen=True)
class DraftWalk(DraftBlock):
    """Source: tokens drawn from left to right from one forward of the drafter (DFlash 2, DSpark). Small matrices make
    the logits of a slot depend on the token before it."""

    def _draw(
        self, state: CausalState, rows: np.ndarray, positions: Tensor, output: Tensor, query: CausalQuery
    ) -> tuple[Tensor, Tensor]:
        drafter: Any = state.drafting.model
        confidences: list[Tensor] = []
        with torch.no_grad():
            walk = drafter.walk(output, lambda output: read_logits(state, [output], [query]), state.allowed)

            def logits(slot: int, token: Tensor) -> Tensor:
                if "confidence" in state.memory:
                    confidences.append(walk.confidence(slot, token).sigmoid())
                return walk.logits(slot, token)

            result = draft_in_order(state, rows, positions, logits, walk.slot_candidates)
        if confidences:
            state.memory.write("confidence", rows, torch.nn.functional.pad(torch.stack(confidences, 1), (0, 1)))
        return result
