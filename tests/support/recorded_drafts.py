"""What a drafter drafts after a given token, with given numbers; and answers of the model alone beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from drafters import exactness
from torch import Tensor

import paradec
from paradec.models.base import Model
from paradec.request import Request
from paradec.samplers.distributions import probability, token_distribution


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


def plain(base: Model, prompt: list[int], negative: list[int], new: int, scale: float) -> list[int]:
    """The greedy answer of the model alone, under guidance of `scale`."""
    ids: list[int] = []
    for _ in range(new):
        with torch.no_grad():
            own, other = (base.module(torch.tensor([each + ids])).logits[0, -1] for each in (prompt, negative))
        ids.append(int((other + scale * (own - other)).argmax()))
    return ids


def p_value(
    drafter: Any, base: Model, rows: int, kept: Sequence[int] = (1, 7, 20, 33, 45, 60), **request: Any
) -> float:
    """Of two tokens after one prompt against the model's own distribution, with all tokens but six suppressed."""
    prompt = [3, 14, 15]
    request = {"temperature": 1.0, **request, "suppress_tokens": [i for i in range(64) if i not in kept]}
    sampler = paradec.samplers.create("speculative", drafter=drafter)
    out = paradec.generate(base, [prompt] * rows, sampler=sampler, max_new_tokens=3, seed=5, **request)
    found = torch.stack([row[1:] for row in out.new_tokens])
    pairs = torch.cartesian_prod(*[torch.tensor([*kept])] * 3)
    with torch.no_grad():
        logits = base.module(torch.cat((torch.tensor(prompt).expand(len(pairs), -1), pairs), 1)).logits[:, 2:-1]
    allowed = torch.zeros(64, dtype=torch.bool).index_fill(0, torch.tensor([*kept]), True)
    p = probability(token_distribution(logits, Request(temperature=request["temperature"]), allowed), pairs).prod(1)
    p = p.reshape(6, 36).sum(0)
    pairs = torch.cartesian_prod(*[torch.tensor([*kept])] * 2)
    counts = exactness.counted(found, pairs, 64)
    return float(exactness.p_value(counts, p.double().numpy()))
