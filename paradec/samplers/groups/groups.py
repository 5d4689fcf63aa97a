"""LPD's decoding: each call reads the last group's tokens, and asks for the next group by masks at its positions.

Zhang et al., "Locality-aware Parallel Decoding for Efficient Autoregressive Image Generation", arXiv 2507.01957, and
its public code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import orders
from paradec.core.checks import check_choice
from paradec.core.orders import Order
from paradec.core.query import StoreCall
from paradec.models.images.grouped import GroupQuery
from paradec.samplers.groups.base import GroupSampler, GroupState


@dataclass(frozen=True)
class Groups(GroupSampler):
    """Per call, evaluate the tokens of the last group (at first the class) and a mask at every position of the next
    one; draw that group's tokens independently.

    Keys and values are written at ranks of the order. The next call overwrites those of masks by those of the tokens at
    the same positions. Tokens see all ranks up to their own group's end; masks also see each other.

    Args:
        order: which positions are decided together: a name of `paradec.core.orders.names()`, one made by
            `paradec.core.orders.create`, or its plain data ({"order": "lpd", "sizes": 32, "repulsion": 3}). If it
            has no sizes, the request's `steps` is the number of groups. Without `steps`, LPD's order has its
            published sizes, and other orders have groups of one position.
        guidance_schedule: "linear" grows from 1 with the rank r of S, 1 + (scale - 1) r / S, as published; "constant"
            does not grow.

    Raises:
        ValueError: a setting out of its range. TypeError: no order.
    """

    order: str | Order | Mapping[str, Any] = "lpd"
    guidance_schedule: str = "linear"

    name = "groups"
    paper = "LPD"
    arxiv = "2507.01957"
    summary = "groups of positions in any order, each asked for by masks at its positions"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lpd": {"order": "lpd"}}

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", orders.resolve(self.order))
        check_choice("guidance_schedule", self.guidance_schedule, ("linear", "constant"))

    def order_for(self, steps: int | None) -> Order:
        assert isinstance(self.order, Order)
        return self.order.planned(steps)

    def query(self, state: GroupState) -> list[GroupQuery]:
        last, now = state.index - 1, state.index
        read, asked = state.positions(last), state.positions(now)
        positions = state.both(torch.cat((read, asked), 1))
        tokens = state.context.gather(1, positions)  # blank where nothing is decided
        ranks = torch.cat((state.ranks(last), state.ranks(now)))
        ends = torch.tensor([state.end(last), state.end(now)], device=ranks.device)
        sees = ends.repeat_interleave(torch.tensor([read.shape[1], asked.shape[1]], device=ranks.device))
        rows = np.arange(len(tokens))
        at = torch.as_tensor(rows, device=ranks.device)
        return [
            GroupQuery(
                rows=state.rows,
                tokens=tokens,
                positions=positions,
                wanted=torch.arange(read.shape[1], len(ranks), device=ranks.device).expand(len(rows), -1),
                store=StoreCall(at, ranks.expand(len(rows), -1), rows, state.end(now), step=state.commits),
                sees=sees.expand(len(rows), -1),
                branches=state.branches,
                forwarded=np.full(state.batch, len(ranks)),
                kind="window" if state.index else "full",
            )
        ]

    def guidance(self, state: GroupState) -> float | Tensor:
        scale = state.request.guidance_scale
        if self.guidance_schedule == "constant":
            return scale
        rank = state.ranks(state.index) - state.prompt
        dtype = torch.promote_types(state.dtype, torch.float32)
        return (1 + (scale - 1) * rank.to(dtype) / state.groups.order.shape[1]).view(1, -1, 1)
