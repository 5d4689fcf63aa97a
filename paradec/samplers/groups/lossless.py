"""Pictures in any order, exactly: what deciding one position a step draws, in fewer calls.

A model that is asked by masks at positions (LPD) says in one call, for every position, what it is given the tokens
before it in a row's order: a call holds tokens in the order's ranks, and queries, of which each sees the tokens of
lower rank and itself. So such a model is one of any order, and the loop is `paradec.samplers.causal.any_order`'s. What
is decided is what groups of one position decide: LPD's larger groups see each other's queries, and are another
distribution.

Keys and values of tokens are kept at their ranks. A call writes those of the last final token and of the drafts, which
are written again until they are final; a query's are its own, and are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import RankedQuery
from paradec.core.orders import keyed
from paradec.core.prompts import Prompts
from paradec.core.query import StoreCall
from paradec.models.images.grid import Grid
from paradec.request import DEFAULTS, Request
from paradec.samplers.causal import any_order
from paradec.samplers.causal.any_order import OrderedState
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.state import Spans
from paradec.samplers.causal.window import Jacobi, JacobiSampler
from paradec.samplers.filters import filtered_distribution
from paradec.samplers.groups.base import checked_rows
from paradec.samplers.starting import keys_of

METHODS: dict[str, type[JacobiSampler]] = {"jacobi": Jacobi, "sjd": SJD, "scd": SCD}
"""What verifies drafts: by fixed noise, with which tokens are those of one position a step, or by a quotient."""


@dataclass
class RankedState(OrderedState):
    """An `OrderedState` of pictures: guided by rank, over a store whose slots are ranks."""

    guidance: float = 1.0
    grows: bool = False
    """Whether guidance grows from 1 with the rank, as published."""

    def _call(self, store: Any, spans: Spans, index: np.ndarray) -> Any:
        query = super()._call(store, spans, index)
        rows, device = query.rows, query.tokens.device
        ranks = torch.as_tensor(self._ranks(rows), device=device).gather(1, query.positions)
        slot, left = np.arange(self.width), self.slots(rows)
        wanted = np.minimum(slot, left[:, None] - 1)[:, : left.max()]
        cells = self.length[rows, None] - self.known[rows, None]
        done = (self.committed - self.known)[rows, None] + wanted
        scale = 1 + (self.guidance - 1) * done / cells if self.grows else np.full(done.shape, self.guidance)
        final = int(spans.begin[index].max())
        return RankedQuery(
            **{
                **vars(query),
                "branches": 1 if self.guidance == 1 else 2,
                "ranks": ranks,
                "scale": torch.as_tensor(scale, device=device),
                "asked": torch.as_tensor(slot[: left.max()] < left[:, None], device=device),
                "store": StoreCall(query.store.rows, None, rows, final, step=self.commits),
            }
        )

    def distribution(self, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        request = self.request
        assert self.allowed is not None
        logits = logits.masked_fill(~self.allowed, -torch.inf)
        return filtered_distribution(logits, request.temperature, request.top_k, request.top_p)


def start(
    sampler: Any, model: Any, prompt: Any, request: Request, grid: Grid | None, negative_prompt: Any
) -> RankedState:
    """The state of a request of `Groups(lossless=True)`; arguments as for `GroupSampler.start`.

    Raises:
        ValueError: as there.
    """
    grid = model.grid() if grid is None else grid
    rows, negative = checked_rows(model, prompt, request, negative_prompt)
    # the order of a row is the one that its groups would be of
    keys, _ = keys_of(request, rows, torch.device("cpu"))
    order = sampler.order_for(request.steps).groups(grid.height, grid.width, keyed(keys)).order
    masked = [[*row, *[model.blank_id] * grid.length] for row in rows]
    own = replace(request, sampler=DEFAULTS["sampler"], guidance_scale=1.0, steps=None, order=order.tolist())
    view, encoded = model.in_any_order(1 + bool(negative)), Prompts(masked, single=False, starts=[0] * len(rows))
    state = any_order.start(sampler.exact, view, encoded, own, kind=RankedState)
    assert isinstance(state, RankedState)
    state.guidance, state.grows = request.guidance_scale, sampler.guidance_schedule == "linear"
    return state
