"""From logits to candidates: guidance, what is never proposed, the method's own stage, tokens and their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.contract import CanvasState
from paradec.core.query import WindowQuery
from paradec.samplers.distributions import tempered
from paradec.samplers.filters import draw_filtered, filter_logits
from paradec.samplers.guidance import guided
from paradec.samplers.masked import reference
from paradec.samplers.masked.draws import of_tokens
from paradec.samplers.masked.queries import owners
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import WATCHED
from paradec.samplers.masked.views import Stage
from paradec.samplers.statistics import token_statistics


def proposable(sampler: Any, state: MaskedState, logits: Tensor, query: WindowQuery) -> Tensor:
    """The logits [R, W, V] before the method's own stage: guided, without the tokens that are not proposed."""
    logits = guide(sampler, state, logits, query)
    holes: Any = state.features.get("holes")
    if holes is not None:
        holes.exclude_ends(state, logits, query.window.index)
    return logits


def guide(sampler: Any, state: CanvasState, logits: Tensor, query: WindowQuery) -> Tensor:
    """The logits stage up to `process_logits`: guidance, and the tokens that are never proposed."""
    request = state.request
    if request.guidance_scale != 1.0:
        logits = guided(logits, sampler.guidance(state, query.rows))
    elif request.temperature > 0:
        # scaled logits can leave the range of float16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # in place: the logits are this step's own, and can be large
    if not sampler.weighs_mask(state):
        logits.select(-1, state.mask_id).fill_(-torch.inf)
    if state.suppressed is not None:
        if state.suppressed.ndim == 1:
            logits.index_fill_(-1, state.suppressed, -torch.inf)
        else:  # of each row its own
            own = state.suppressed[torch.as_tensor(owners(query, len(logits)), device=logits.device)]
            logits.scatter_(-1, own.unsqueeze(1).expand(-1, logits.shape[1], -1), -torch.inf)
    return logits


def own_stage(
    sampler: Any, state: MaskedState, logits: Tensor, query: WindowQuery, available: Tensor, current: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits [R, W, V] that tokens are chosen from, and what stop rules and `process_logits` read off them."""
    watched: dict[str, Tensor] = {}
    early: Any = state.features.get("early_stops")
    if early is not None:
        watched = {WATCHED + name: found for name, found in token_statistics(logits, early.reads)[1].items()}
    if not sampler.needs.processes_logits:
        return logits, watched
    seen = [available, state.window.positions, current]
    if len(query.rows) < len(available):
        index = torch.as_tensor(query.window.index, device=available.device)
        seen = [tensor.index_select(0, index) for tensor in seen]
    available, positions, current = seen
    memory = state.memory.read(query.rows, available.shape[1])
    processed, found = sampler.process_logits(logits, Stage(available, positions, memory, current))
    return processed, watched | dict(found)


def candidates(
    sampler: Any, state: CanvasState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
    request, needs = state.request, sampler.needs
    statistics = token_statistics if generator is None else reference.statistics
    filters = request.top_p, request.top_k
    filtered = any(each is not None for each in filters)
    if generator is not None and sampler.weighs_mask(state):
        return reference.read(sampler, state, logits, query, generator)
    if request.temperature == 0 and not (filtered and needs.score_from == "sampled"):
        return statistics(logits, needs.reads)
    raw = needs.score_from == "raw"
    counted = generator is None and request.temperature > 0 and not needs.draws_tokens
    if counted and not filtered:
        found_in = 1.0 if raw else request.temperature
        return token_statistics(logits, needs.reads, None, of_tokens(state, query, request.temperature), found_in)
    if counted and raw:
        drawn = draw_filtered(logits, of_tokens(state, query).uniform(), request.temperature, *filters)
        if drawn is not None:
            return token_statistics(logits, needs.reads, drawn)
    drawn_from = logits if request.temperature in (0, 1) else tempered(logits, request.temperature)
    drawn_from = filter_logits(drawn_from, *filters, sorted_ties=generator is not None)
    if counted and not raw:
        return token_statistics(drawn_from, needs.reads, None, of_tokens(state, query))
    drawn = None if request.temperature == 0 else sampler.draw_tokens(state, drawn_from, query, generator)
    return statistics(logits if raw else drawn_from, needs.reads, drawn)


def in_row_order(
    parts: list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]], queries: list[WindowQuery]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Candidates, quantities and what the stage found of several queries, as those of all running rows; and where these
    [R] were in the answers one after the other."""
    tokens, quantities, updates = zip(*parts, strict=True)
    places = np.argsort(np.concatenate([query.window.index for query in queries]))
    order = torch.as_tensor(places, device=tokens[0].device)
    read = {name: torch.cat([part[name] for part in quantities])[order] for name in quantities[0]}
    found = {name: torch.cat([part[name] for part in updates])[order] for name in updates[0]}
    return torch.cat(tokens)[order], read, found, order


def spread(
    tokens: Tensor, quantities: Mapping[str, Tensor], query: WindowQuery, current: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Candidates and quantities [N, K] of a query's columns as those of the whole window [N, W]; of the others the
    token there (`current` [R, W]), and 0."""
    columns = query.window.columns
    assert columns is not None
    if len(columns) < len(current):
        current = current[torch.as_tensor(query.window.index, device=current.device)]
    whole = {}
    for name, value in quantities.items():
        whole[name] = value.new_zeros(current.shape).scatter_(1, columns, value)
    return current.scatter(1, columns, tokens), whole
