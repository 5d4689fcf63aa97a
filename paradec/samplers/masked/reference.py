"""Draws and ties as in the public generate.py of LLaDA and Dream, for `rng="reference"`. All rows draw from one stream,
so that a row's numbers depend on the other rows. torch.topk decides among equal scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import WindowQuery
from paradec.samplers.distributions import divide_logits, filter_logits
from paradec.samplers.features.feature import Feature
from paradec.samplers.masked.state import MaskedState


class ReferenceNumbers(Feature):
    """Draws of the public codes from the state's generator, which only commits advance."""

    why_rows_fixed = "rng='reference' draws all rows from one stream"
    why_host_only = "rng='reference' draws on the host"

    def reads_window(self, state: MaskedState) -> bool:
        return True  # the public codes draw for whole windows


def generator_after(generator: torch.Generator, generator_state: Tensor | None) -> torch.Generator:
    """Copy the generator, and set the copy to `generator_state`, the state after the step's proposal."""
    assert generator_state is not None
    copy = generator.clone_state()
    copy.set_state(generator_state)
    return copy


def draw_categorical(
    state: MaskedState,
    logits: Tensor,
    positions: Tensor,
    rows: np.ndarray,
    generator: torch.Generator,
    selected: Tensor | None = None,
) -> Tensor:
    """Draw as Dream does, by torch.multinomial in the logits' dtype, at masked positions; with `selected` [R, W] bool,
    only at selected masked positions. Other positions get their best token."""
    canvas = state.canvas[torch.as_tensor(rows, device=positions.device).unsqueeze(1), positions]
    masked = torch.eq(canvas, state.facts.mask_id)
    if selected is not None:
        masked &= selected
    probabilities = logits[masked].softmax(-1)
    drawn = torch.multinomial(probabilities.cpu(), 1, replacement=True, generator=generator).squeeze(-1)
    tokens = logits.argmax(-1)
    tokens[masked] = drawn.to(tokens.device)
    return tokens


def top_by_topk(state: MaskedState, scores: Tensor, count: np.ndarray | Tensor | int) -> Tensor:
    """Select the `count` highest scores by torch.topk over each whole row, as the public codes do: [R, W] bool."""
    window = state.window
    canvas_scores = torch.full(state.canvas.shape, -torch.inf, dtype=scores.dtype)
    canvas_scores[window.row_index.cpu(), window.positions.cpu()] = scores.cpu()
    selected = torch.zeros_like(canvas_scores, dtype=torch.bool)
    count = np.full(len(scores), count) if isinstance(count, int) else count
    # a rule's count may exceed the row or be negative
    for row, num_selected in zip(window.rows.tolist(), count.clip(0, canvas_scores.shape[1]).tolist(), strict=True):
        selected[row, canvas_scores[row].topk(num_selected).indices] = True
    return selected.to(scores.device)[window.row_index, window.positions] & (scores > -torch.inf)


def position_noise(state: MaskedState, draws: str, generator: torch.Generator) -> Tensor:
    """Draw uniform float32 numbers [R, W], returned as float64. draws: "canvas" (all positions) or "masked" ones."""
    canvas = torch.ones(state.canvas.shape, dtype=torch.float64)
    if draws == "canvas":
        canvas = torch.rand(state.canvas.shape, generator=generator).double()
    else:
        masked = state.undecided.cpu()
        canvas[masked] = torch.rand(int(masked.sum()), generator=generator).double()
    return canvas.to(state.canvas.device)[state.window.row_index, state.window.positions]


def choose_positions(
    state: MaskedState, weights: Tensor, count: np.ndarray | int, generator: torch.Generator
) -> Tensor:
    """Draw positions by torch.multinomial without replacement over whole rows: weights [R, W] -> [R, W] bool."""
    window, max_count = state.window, int(np.max(count))
    canvas_weights = torch.zeros(state.canvas.shape, dtype=torch.float32, device=weights.device)
    canvas_weights[window.row_index, window.positions] = weights.float()
    chosen = torch.zeros_like(canvas_weights, dtype=torch.bool)
    if max_count > 0:
        drawn = torch.multinomial(canvas_weights.cpu(), max_count, generator=generator).to(canvas_weights.device)
        chosen.scatter_(1, drawn, True)
    return chosen[window.row_index, window.positions]


def gumbel_uniform(
    state: MaskedState, vocab: int, rows: np.ndarray, positions: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw uniform float64 numbers for LLaDA's noise over the canvas [B, L, V]; return those at `positions` [R, W]."""
    noise = torch.rand((*state.canvas.shape, vocab), dtype=torch.float64, generator=generator).to(positions.device)
    return noise[torch.as_tensor(rows, device=positions.device).unsqueeze(1), positions]


def read_candidates(
    sampler: Any, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute candidates and quantities [R, W] from logits [R, W, V]. As in the public code, the mask is not a
    candidate, but the softmax includes it: the mask's probability orders nearly certain positions."""
    request = state.request
    proposable = logits.index_fill(-1, torch.tensor(state.facts.mask_id, device=logits.device), -torch.inf)
    tokens = best = proposable.argmax(-1)
    if request.temperature > 0:
        draw_logits = filter_logits(divide_logits(proposable, request.temperature), *request.filters)
        tokens = sampler.draw_tokens(state, draw_logits, query, generator)
    if sampler.needs.score_from == "sampled":
        logits = logits if request.temperature == 0 else divide_logits(logits, request.temperature)
        logits = filter_logits(logits, *request.filters)
    tokens, quantities = statistics(logits, sampler.needs.reads, tokens)
    return tokens, {**quantities, "best_token": best} if "best_token" in quantities else quantities


def statistics(
    logits: Tensor, reads: tuple[str, ...], tokens: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `token_statistics` in the dtype of the logits, as the public codes do. Trained models saturate float32
    probabilities at exactly 1, and the order of such positions depends on the last bits."""
    p = logits.softmax(dim=-1)
    tokens = logits.argmax(-1) if tokens is None else tokens
    quantities: dict[str, Tensor] = {}
    if "confidence" in reads:
        quantities["confidence"] = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
    if "margin" in reads:
        first, second = p.topk(2, dim=-1).values.unbind(-1)
        quantities["margin"] = (first - second).double()
    if "best_token" in reads:
        quantities["best_token"] = logits.argmax(-1)
    if "negative_entropy" in reads:
        quantities["negative_entropy"] = (p * (p + 1e-10).log()).sum(-1).double()
    if "minus_entropy" in reads:
        quantities["minus_entropy"] = -torch.special.entr(p).sum(-1).double()
    return tokens, quantities
