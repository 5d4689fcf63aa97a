"""Calls that evaluate only some positions of each row (with a store), some rows, or some columns of the window."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.core.query import StoreCall, WindowQuery
from paradec.samplers.masked.state import MaskedState


def build_store_call(state: MaskedState, part: Part, query: WindowQuery) -> StoreCall:
    """Build the store call of a part's query: the rows and slots of the store that it reads and writes."""
    rows, cache = query.rows, state.stored_cache
    index = np.concatenate([rows + branch * state.batch for branch in range(state.branches)])
    slots = query.positions
    if part.valid is not None:
        slots = state.per_branch(np.where(part.valid, part.positions, -1))
    # a row sees nothing after its end and, in a block-causal model, nothing after the last block that it evaluates
    length = state.length[rows]
    if (present := state.present) is not None:  # `Suffix` may omit positions at the end
        length = np.minimum(length, state.canvas.shape[1] - present[rows][:, ::-1].argmax(1))
    visible = int(length.max())
    if state.facts.topology == "block_causal":
        last = part.positions.max(1)
        visible = min(visible, int(state.facts.block_bounds(last, last + 1, state.prompt_length[rows])[1].max()))
    visible += -visible % cache.shape_multiple
    return StoreCall(torch.as_tensor(index, device=state.canvas.device), slots, index, visible, step=state.commits)


def find_columns(state: MaskedState, part: Part, source: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Find the columns [branches * N, W] of a part's call that evaluate positions `source` [N, W]; also return which of
    these positions the call evaluates: [N, W] bool (None: all)."""
    column_of_position = np.full((len(part.index), state.canvas.shape[1]), -1)
    row, column = np.ones_like(part.positions).nonzero() if part.valid is None else part.valid.nonzero()
    column_of_position[row, part.positions[row, column]] = column
    columns = np.take_along_axis(column_of_position, source, axis=1)
    is_evaluated = columns >= 0
    available = None if is_evaluated.all() else torch.as_tensor(is_evaluated, device=state.canvas.device)
    return state.per_branch(np.maximum(columns, 0)), available


def merge_parts(
    parts: list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]], queries: list[WindowQuery]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Merge the queries' candidates, quantities and updates in the order of the running rows; also return the order."""
    tokens, quantities, updates = zip(*parts, strict=True)
    order_on_host = np.argsort(np.concatenate([query.window.index for query in queries]))
    order = torch.as_tensor(order_on_host, device=tokens[0].device)
    merged_quantities = {name: torch.cat([part[name] for part in quantities])[order] for name in quantities[0]}
    merged_updates = {name: torch.cat([part[name] for part in updates])[order] for name in updates[0]}
    return torch.cat(tokens)[order], merged_quantities, merged_updates, order


def scatter_to_window(
    tokens: Tensor, quantities: Mapping[str, Tensor], query: WindowQuery, current: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scatter candidates and quantities [N, K] of a query into windows [N, W], which otherwise hold `current` and 0."""
    columns = query.window.columns
    assert columns is not None
    if len(columns) < len(current):
        current = current[torch.as_tensor(query.window.index, device=current.device)]
    window_quantities = {}
    for name, value in quantities.items():
        window_quantities[name] = value.new_zeros(current.shape).scatter_(1, columns, value)
    return current.scatter(1, columns, tokens), window_quantities
