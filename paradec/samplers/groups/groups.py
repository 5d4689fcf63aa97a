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
from paradec.core.checks import check_bool, check_choice, check_int
from paradec.core.family_queries import GroupQuery
from paradec.core.orders import Order
from paradec.core.protocol import Commit, Proposal
from paradec.core.query import StoreCall
from paradec.core.trace import Notes
from paradec.request import Request, request_for
from paradec.samplers.causal.window import JacobiSampler
from paradec.samplers.groups import lossless
from paradec.samplers.groups.base import GroupSampler, GroupState
from paradec.samplers.groups.lossless import RankedState


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
        lossless: decide what groups of one position decide in this order, in fewer calls: each call asks for all
            undecided positions, given drafts for them, and those drafts become final that the order bears out
            (`paradec.samplers.groups.lossless`). The order's sizes shape the order alone.
        verify: how. "jacobi": the noise of a position is kept, and the tokens are those of one position a call with
            the same noise. "sjd", "scd": drafts are accepted by their probabilities; the same distribution.
        window: with `lossless`, how many positions a call may decide; None is all, 1 one a call.

    Raises:
        ValueError: a setting out of its range. TypeError: no order.
    """

    order: str | Order | Mapping[str, Any] = "lpd"
    guidance_schedule: str = "linear"
    lossless: bool = False
    verify: str = "jacobi"
    window: int | None = None

    name = "groups"
    paper = "LPD"
    arxiv = "2507.01957"
    summary = "groups of positions in any order, each asked for by masks at its positions"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lpd": {"order": "lpd"}}

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", orders.resolve(self.order))
        check_choice("guidance_schedule", self.guidance_schedule, ("linear", "constant"))
        check_bool("lossless", self.lossless)
        check_choice("verify", self.verify, lossless.METHODS)
        check_int("window", self.window, low=1, none=True)
        if not self.lossless and (self.verify != "jacobi" or self.window is not None):
            name = "window" if self.window is not None else "verify"
            raise ValueError(f"{name}={getattr(self, name)!r} has no meaning without lossless=True: leave it out")

    @property
    def exact(self) -> JacobiSampler:
        """The method that verifies drafts."""
        return lossless.METHODS[self.verify](window=self.window)

    def start(
        self,
        model: Any,
        prompt: Any,
        request: Request | None = None,
        *,
        grid: Any = None,
        negative_prompt: Any = None,
        **arguments: Any,
    ) -> Any:
        """As for all (`GroupSampler.start`); with `lossless` a state of the causal family's loop."""
        if not self.lossless:
            return super().start(model, prompt, request, grid=grid, negative_prompt=negative_prompt, **arguments)
        self.check_model(model)
        return lossless.start(self, model, prompt, request_for(self, request, arguments), grid, negative_prompt)

    def order_for(self, steps: int | None) -> Order:
        assert isinstance(self.order, Order)
        return self.order.planned(steps)

    def query(self, state: Any) -> list[Any]:
        return self.exact.query(state) if isinstance(state, RankedState) else self._groups(state)

    def propose(self, state: Any, outputs: list[Tensor], queries: list[Any]) -> Proposal:
        if isinstance(state, RankedState):
            return self.exact.propose(state, outputs, queries)
        return super().propose(state, outputs, queries)

    def commit(self, state: Any, proposal: Proposal) -> Commit:
        return self.exact.commit(state, proposal) if isinstance(state, RankedState) else super().commit(state, proposal)

    def observe(self, state: Any, proposal: Any) -> Notes:
        if isinstance(state, RankedState):
            return self.exact.observe(state, proposal)
        return super().observe(state, proposal)

    def _groups(self, state: GroupState) -> list[GroupQuery]:
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
