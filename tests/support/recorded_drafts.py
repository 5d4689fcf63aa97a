"""What a drafter drafts after a given token, with given numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.request import Request


def drafts_after(
    drafter: Any, base: Model, ids: Tensor, case: dict[str, Any], window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Drafts [n] and their q [n, V] after `anchor` evaluated tokens and the one at the anchor, which the first
    step commits: its logits are made to say so. `case["uniform"]` are the numbers that drafts are drawn with. window:
    of drafters that draft token by token."""
    settings = {} if window is None else {"window": window}
    anchor, sampler = case["anchor"], paradec.samplers.create("speculative", drafter=drafter, **settings)
    width = window or drafter.slots
    request = Request(max_new_tokens=width + 1, temperature=case["temperature"])
    state = sampler.start(base, ids[None, :anchor], request)
    queries = sampler.query(state)
    outputs = [base(query, state.store) for query in queries]
    certain = [torch.full_like(each, -1e4).index_fill(-1, ids[anchor : anchor + 1], 0.0) for each in outputs]
    proposal = sampler.propose(state, certain, queries)
    numbers = iter(case["uniform"])

    def uniform(rows: Any, positions: Tensor, *rest: Any) -> Tensor:
        return torch.tensor([next(numbers) for _ in range(positions.shape[1])], dtype=torch.float64)[None, :, None]

    object.__setattr__(state, "uniform", uniform)
    sampler.commit(state, proposal)
    return state.memory["drafts"][0, : width - 1], state.memory["draft_distribution"][0, : width - 1]
