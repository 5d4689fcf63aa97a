"""Draws of tokens and positions in the masked family."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.query import WindowQuery
from paradec.kernels.token_stats import TokenDraws, token_statistics
from paradec.request import NO_FILTERS
from paradec.samplers.distributions import apply_temperature, draw_filtered, filter_logits
from paradec.samplers.masked import reference
from paradec.samplers.statistics import top_by_rank


def draw_candidates(
    sampler: Any, state: Any, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute candidate tokens and quantities, both [R, W], of one query's rows, at any temperature and filters."""
    request, needs = state.request, sampler.needs
    if generator is not None and sampler.weighs_mask(state):
        return reference.read_candidates(sampler, state, logits, query, generator)
    statistics = token_statistics if generator is None else reference.statistics
    uses_raw, filters = needs.score_from == "raw", request.filters  # raw scores ignore temperature and filters
    has_filters = filters != NO_FILTERS
    if request.temperature == 0 and (uses_raw or not has_filters):
        return statistics(logits, needs.reads)
    draws_by_key = generator is None and request.temperature > 0 and not needs.draws_tokens
    if draws_by_key and not has_filters:
        draws = token_draws(state, query, request.temperature)
        return token_statistics(logits, needs.reads, None, draws, 1.0 if uses_raw else request.temperature)
    if draws_by_key and uses_raw:
        drawn_tokens = draw_filtered(logits, token_draws(state, query).uniform(), request.temperature, *filters)
        if drawn_tokens is not None:
            return token_statistics(logits, needs.reads, drawn_tokens)
    draw_logits = logits if request.temperature in (0, 1) else apply_temperature(logits, request.temperature)
    draw_logits = filter_logits(draw_logits, *filters, sorted_ties=generator is not None)
    if draws_by_key and not uses_raw:
        return token_statistics(draw_logits, needs.reads, None, token_draws(state, query))
    drawn_tokens = None if request.temperature == 0 else sampler.draw_tokens(state, draw_logits, query, generator)
    return statistics(logits if uses_raw else draw_logits, needs.reads, drawn_tokens)


def token_draws(state: Any, query: WindowQuery, temperature: float = 1.0, stream: int = rng.TOKEN_STREAM) -> TokenDraws:
    """Make the random numbers for the tokens of a query, from each row's key and step."""
    rows, positions = query.rows, state.window.query_positions(query)
    steps = torch.as_tensor(state.row_step[rows], device=positions.device)
    keys = state.keys[torch.as_tensor(rows, device=positions.device)]
    return TokenDraws(keys, steps, positions, temperature, stream)


def choose_positions(
    sampler: Any, state: Any, generator: torch.Generator | None, scores: Tensor, count: np.ndarray | int
) -> Tensor:
    """Draw `count` [R] positions without replacement from softmax(scores [R, W]), for `View.choose`: [R, W] bool."""
    if generator is not None:
        return reference.choose_positions(state, scores.softmax(-1).nan_to_num(), count, generator)
    # Gumbel-top-k has the same distribution, also for positions whose probability underflows
    return top_by_rank(scores + rng.gumbel(sampler.position_noise(state, None)), count)
