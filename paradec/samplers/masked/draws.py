"""Random numbers of a step: tokens from their distributions, and which positions are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.contract import CanvasState
from paradec.core.query import WindowQuery
from paradec.kernels.token_stats import TokenDraws, read_stats
from paradec.samplers.masked import reference
from paradec.samplers.masked.queries import positions_of
from paradec.samplers.statistics import top_by_rank


def of_tokens(
    state: CanvasState, query: WindowQuery, temperature: float = 1.0, stream: int = rng.TOKEN_STREAM
) -> TokenDraws:
    """Where the numbers come from that the tokens of a query's rows are drawn with."""
    rows, positions = query.rows, positions_of(state, query)
    steps = torch.as_tensor(state.row_step[rows], device=positions.device)
    keys = state.keys[torch.as_tensor(rows, device=positions.device)]
    return TokenDraws(keys, steps, positions, temperature, stream)


def tokens(
    sampler: Any, state: CanvasState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
) -> Tensor:
    """Draw tokens [R, W] from softmax(logits [R, W, V]); a generator's by the Gumbel-max trick, in float64."""
    if generator is None:
        sample = read_stats(logits, frozenset(), draws=of_tokens(state, query)).sample
        assert sample is not None  # asked for with `draws`
        return sample
    rows, positions = query.rows, positions_of(state, query)
    if sampler.needs.score_from == "sampled":
        return reference.categorical(state, logits, positions, rows, generator)
    noise = reference.gumbel_uniform(state, logits.shape[-1], rows, positions, generator)
    return (logits.double() + rng.gumbel(noise)).argmax(-1)


def position_noise(sampler: Any, state: CanvasState, generator: torch.Generator | None) -> Tensor:
    """[R, W] float64 uniform numbers for choosing positions."""
    if generator is not None:
        return reference.position_noise(state, sampler.needs.reference_draws, generator)
    window = state.window
    steps = torch.as_tensor(state.row_step[window.rows], device=window.positions.device)
    keys = state.keys[window.row_index[:, 0]]
    return rng.uniform(keys, steps, window.positions, 1, rng.POSITION_STREAM).squeeze(-1)


def choose(
    sampler: Any, state: CanvasState, scores: Tensor, count: np.ndarray, generator: torch.Generator | None
) -> Tensor:
    """Draw `count` positions of each row without replacement, with the probabilities softmax(scores)."""
    if generator is not None:
        return reference.choose(state, scores.softmax(-1).nan_to_num(), count, generator)
    # Gumbel-top-k draws the same distribution, also of positions whose probability is too small for a number
    return top_by_rank(scores + rng.gumbel(sampler.position_noise(state, None)), count)
