"""Drafts of a whole window in one forward of the drafter (DFlash, `paradec.models.dflash`).

It reads what the model's layers made of the new final tokens, which enter its key/value store, then the last final
token with masks after it, which do not. Each mask's logits are the q of its own position: the drafts are drawn
independently of each other and verified as any chain.
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
from paradec.samplers.causal.drafts.source import checked, right_aligned, that_fit, write_drafts
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState, read_logits


@dataclass(frozen=True)
class DraftBlock:
    """A window of masks that one forward of the drafter fills."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        drafting = state.drafting
        drafter: Any = drafting.model
        assert features is not None  # such drafters read them
        query, fresh = block_query(state, drafting.fed[rows], rows, drafter.block_size, drafter.mask_token_id)
        width = query.tokens.shape[1] - drafter.block_size
        context = right_aligned(features, fresh, width)
        with torch.no_grad():
            answer = drafter(query, context, drafting.store)
        drafting.nfe += Cost([query], state.batch).nfe
        drafting.fed[rows] = state.committed[rows] - 1
        positions = state.positions(rows)[:, :-1]
        drafts, q = self._drawn(state, rows, positions, answer[:, : state.width - 1], query)
        write_drafts(state, rows, drafts, q)

    def _drawn(
        self, state: CausalState, rows: np.ndarray, positions: Tensor, found: Tensor, query: CausalQuery
    ) -> tuple[Tensor, Tensor]:
        """Drafts [R, n] at positions [R, n] and what they are drawn from [R, n, V], of what the drafter made."""
        logits = read_logits(state, [found], [query])
        if state.constraint is not None:
            return in_turn(state, rows, positions, lambda slot, before: logits[:, slot])
        q = checked(state.drafting, rows, state.distribution(logits, rows, positions))
        return draw(q, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)), q


def in_turn(
    state: CausalState,
    rows: np.ndarray,
    positions: Tensor,
    logits: Callable[[int, Tensor], Tensor],
    candidates: Callable[[int], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draft [R, n] at positions [R, n] from left to right; also return what the drafts are drawn from, [R, n, V].

    Args:
        logits: called with a slot and the tokens before it [R]; returns [R, V].
        candidates: called with a slot; returns the ids [R, K] outside of which these are -inf, or None for the
            vocabulary.
    """
    drafting, device = state.drafting, positions.device
    last = torch.as_tensor(state.committed[rows] - 1 + state.shift[0, rows], device=device)
    token = state.context[torch.as_tensor(rows, device=device), last]
    uniform = state.uniform(rows, positions, 1, DRAFT_STREAM)
    drafts, every_q = positions[:, :0], []
    for slot in range(positions.shape[1]):
        slot_logits = logits(slot, token).unsqueeze(1)
        before, parents = torch.nn.functional.pad(drafts, (1, 0)), torch.arange(-1, slot).unsqueeze(0)
        slot_logits = that_fit(state, slot_logits, rows, parents, before, [slot])
        q = state.distribution(slot_logits, rows, positions[:, slot : slot + 1])
        free = candidates is None or state.prescribes or state.constraint is not None
        token = _drawn_from(q, None if free or candidates is None else candidates(slot), uniform[:, slot])
        drafts = torch.cat((drafts, token.unsqueeze(1)), 1)
        every_q.append(q)
    return drafts, checked(drafting, rows, torch.cat(every_q, 1))


def _drawn_from(q: Tensor, candidates: Tensor | None, uniform: Tensor) -> Tensor:
    """[R]: a token of q [R, 1, V] by uniform [R, 1], in the order of candidates [R, K], outside of which q is 0."""
    if candidates is None:
        return draw(q, uniform).squeeze(1)
    column = draw(q.squeeze(1).gather(1, candidates).unsqueeze(1), uniform)
    return candidates.gather(1, column).squeeze(1)


def block_query(
    state: CausalState, fed: np.ndarray, rows: np.ndarray, size: int, mask_token_id: int
) -> tuple[CausalQuery, np.ndarray]:
    """Query of final tokens that the drafter has not read, right-aligned, then the last final token and masks.

    Args:
        fed: [R] int64: final tokens that it has read. size: columns of the block.

    Returns:
        The query, and how many columns each row of the call has before the block, [branches * R] int64.
    """
    device, shift = state.context.device, state.shift[:, rows]
    begin = np.where(fed > 0, fed + shift, 0).reshape(-1)
    last = (state.committed[rows] - 1 + shift).reshape(-1)  # of the last final token
    fresh = last - begin
    width = int(fresh.max())
    position = last[:, None] - width + np.arange(width + size)
    read = (position >= begin[:, None]) & (position < last[:, None])
    store_rows = state.every(rows)
    row_index = torch.as_tensor(store_rows, device=device)
    positions = torch.as_tensor(np.maximum(position, 0), device=device)
    known = positions[:, : width + 1].clamp(max=state.context.shape[1] - 1)
    masks = torch.full((len(last), size - 1), mask_token_id, device=device)
    valid = torch.as_tensor(read | (position >= last[:, None]), device=device)
    slots = torch.as_tensor(np.where(read, position, -1), device=device)
    query = CausalQuery(
        rows=rows,
        tokens=torch.cat((state.context[row_index.unsqueeze(1), known], masks), 1),
        positions=positions,
        valid=valid,
        visible=valid.unsqueeze(1).expand(-1, width + size, -1),
        store=StoreCall(row_index, slots, store_rows, int(begin.max()), step=state.commits),
        branches=state.branches,
        forwarded=fresh[: len(rows)] + size,
        index=np.arange(len(rows)),
        kind="window" if begin.any() else "full",
    )
    return query, fresh


@dataclass(frozen=True)
class DraftWalk(DraftBlock):
    """A window drawn from left to right over one forward of the drafter (DFlash 2, DSpark): small matrices link the
    tokens."""

    def _drawn(
        self, state: CausalState, rows: np.ndarray, positions: Tensor, found: Tensor, query: CausalQuery
    ) -> tuple[Tensor, Tensor]:
        drafter: Any = state.drafting.model
        sure: list[Tensor] = []
        with torch.no_grad():
            walk = drafter.walk(found, lambda parts: read_logits(state, [parts], [query]), state.allowed)

            def logits(slot: int, before: Tensor) -> Tensor:
                if "confidence" in state.memory:
                    sure.append(walk.confidence(slot, before).sigmoid())
                return walk.logits(slot, before)

            drawn = in_turn(state, rows, positions, logits, walk.candidates_of)
        if sure:
            state.memory.write("confidence", rows, torch.nn.functional.pad(torch.stack(sure, 1), (0, 1)))
        return drawn
