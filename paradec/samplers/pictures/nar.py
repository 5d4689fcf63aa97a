"""Sampler of NAR (He et al., arXiv 2503.10696, and its code): it decodes the diagonals of a picture, each token from
the mean of two heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_int
from paradec.core.memory import Memory
from paradec.core.prompts import encode
from paradec.core.protocol import Proposal
from paradec.core.query import Cost, Query, StoreCall
from paradec.kernels.token_stats import draw
from paradec.models.images.grid import Grid
from paradec.request import Request
from paradec.samplers.distributions import apply_guidance, probability
from paradec.samplers.pictures.groups import GroupSampler, PictureState
from paradec.samplers.pictures.start import unsupported_for_pictures
from paradec.samplers.start import make_row_keys, make_trace, pad_rows


@dataclass
class NARState(PictureState):
    """State of a request. A group is a diagonal; cells are numbered row by row."""

    grid: Grid

    @property
    def decided(self) -> int:
        """Number of final cells in each row of the batch."""
        return sum(len(diagonal(self.grid, index)) for index in range(self.index))

    @property
    def done(self) -> bool:
        return self.index == self.grid.height + self.grid.width - 1

    @property
    def progress(self) -> tuple[int, int]:
        return self.decided * self.batch, self.grid.length * self.batch

    def positions(self, cells: Tensor) -> Tensor:
        """[B, W] int64: positions of cells [W] in the rows."""
        return torch.as_tensor(self.prompt_length[:, None], device=cells.device) + cells

    def uniform(self, cells: Tensor) -> Tensor:
        """[B, W] float64 in (0, 1): random numbers that draw the tokens of cells [W] in this step."""
        step = torch.full((self.batch,), self.index, device=cells.device)
        return rng.uniform(self.keys, step, cells.expand(self.batch, -1), 1, rng.TOKEN_STREAM).squeeze(-1)


@dataclass(frozen=True)
class NAR(GroupSampler):
    """Each step decides a diagonal of the picture; g x g cells take 2g - 1 forwards. A cell's logits are the mean of
    the logits from its left neighbour's right head and from its upper neighbour's lower head. Cells of the first row
    and column have only one of these neighbours. The first cell's logits are the mean of both heads at the condition's
    last token. Tokens of a diagonal are drawn independently.

    Guidance u + s (c - u) is applied to the means (c conditional, u unconditional, s the scale); as in the public code
    it is off for any s up to 1. The filters are applied in the order temperature, top-k, top-p.

    Args:
        cfg_interval: a diagonal has no guidance, and its unconditional branch is not evaluated, if more tokens than
            this number are decided before it; -1: all diagonals have guidance.

    Raises:
        ValueError: a setting out of its range.
    """

    cfg_interval: int = -1

    name = "nar"
    models = ("neighbour image",)
    paper = "NAR"
    arxiv = "2503.10696"
    summary = "a diagonal of the picture per forward, from the heads of its left and upper neighbours"
    unsupported = unsupported_for_pictures("temperature", "top_p", "top_k", "chat")

    def __post_init__(self) -> None:
        check_int("cfg_interval", self.cfg_interval, low=-1)

    def _state(self, model: Any, prompt: Any, request: Request, grid: Grid, negative_prompt: Any) -> NARState:
        encoded = encode(model, prompt, None, request.chat)
        prompts = encoded.rows
        contexts, lengths = prompts, np.array([len(row) for row in prompts], np.int64)
        if request.guidance_scale > 1:
            if negative_prompt is None:
                raise ValueError(f"guidance_scale={request.guidance_scale} needs negative_prompt")
            negative = encode(model, negative_prompt, None, request.chat).rows
            if [len(row) for row in negative] != lengths.tolist():
                raise ValueError("negative_prompt must have a row as long as each row of the prompt")
            contexts = [*prompts, *negative]
        longest = int(lengths.max()) + grid.length
        model.facts.check_length(longest, grid.length)
        keys, _ = make_row_keys(request, prompts, model.device, encoded.copy_indices)
        state = NARState(
            batch=len(prompts),
            memory=Memory(),
            request=request.without_objects(),
            grid=grid,
            context=torch.as_tensor(pad_rows(contexts, longest, model.facts.fill_token_id), device=model.device),
            prompt_length=lengths,
            keys=keys,
            store=model.make_store(len(contexts), longest),
        )
        filled = [[(length, length + grid.length)] for length in lengths.tolist()]
        ends = lengths + grid.length
        state.trace = make_trace(self, request, state.canvas, ends, score="probability", filled=filled)
        return state

    def query(self, state: NARState) -> list[Query]:
        """Evaluate the condition in the first step, and the previous diagonal in all other steps."""
        is_guided = len(state.context) > state.batch and not 0 <= self.cfg_interval < state.decided
        branches, device = 2 if is_guided else 1, state.context.device
        index, valid, wanted = np.arange(branches * state.batch), None, None
        rows = torch.as_tensor(index, device=device)
        if state.index == 0:
            lengths = np.tile(state.prompt_length, branches)
            column = np.arange(lengths.max())
            is_valid = column < lengths[:, None]
            positions = torch.as_tensor(np.minimum(column, lengths[:, None] - 1), device=device)
            valid = None if is_valid.all() else torch.as_tensor(is_valid, device=device)
            slots = torch.as_tensor(np.where(is_valid, column, -1), device=device)
            wanted = torch.as_tensor(lengths[:, None] - 1, device=device)
            forwarded, visible_length = state.prompt_length, int(lengths.max())
        else:
            cells = diagonal(state.grid, state.index - 1)
            positions = slots = state.positions(torch.as_tensor(cells, device=device)).repeat(branches, 1)
            forwarded = np.full(state.batch, len(cells))
            visible_length = int(state.prompt_length.max() + cells.max()) + 1
        return [
            Query(
                rows=state.rows,
                tokens=state.context[rows.unsqueeze(1), positions],
                positions=positions,
                wanted=wanted,
                valid=valid,
                store=StoreCall(rows, slots, index, visible_length, step=state.commits),
                branches=branches,
                forwarded=forwarded,
                kind="full" if state.index == 0 else "window",
            )
        ]

    def propose(self, state: NARState, outputs: list[Tensor], queries: list[Query]) -> Proposal:
        """Draw the diagonal from logits [R, W, 2, V] of the condition's last column, or of the previous diagonal."""
        (heads,), (query,) = outputs, queries
        cells = torch.as_tensor(diagonal(state.grid, state.index), device=heads.device)
        averaged = average_heads(heads, state.grid, state.index)  # [R, W, V]
        logits = apply_guidance(averaged, state.request.guidance_scale) if query.branches == 2 else averaged
        p = self.distribution(state, logits)
        tokens = draw(p, state.uniform(cells))
        return Proposal(
            rows=query.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=state.positions(cells),
            scores=probability(p, tokens).double(),
            available=torch.ones_like(tokens, dtype=torch.bool),
            quantities={"averaged": averaged, "logits": logits, "top_logit": logits.amax(-1)},
            made_at=state.commits,
            kind=query.kind,
        )


def diagonal(grid: Grid, index: int) -> np.ndarray:
    """[W] int64: the cells (i, j) with i + j = index, numbered row by row, upper cells first."""
    rows = np.arange(max(0, index - grid.width + 1), min(grid.height, index + 1))
    return rows * grid.width + index - rows


def average_heads(heads: Tensor, grid: Grid, index: int) -> Tensor:
    """Compute logits [R, W, V] of a diagonal's cells.

    heads: [R, W', 2, V]: logits of the previous diagonal's cells (for the first cell: of the condition) for their right
        and lower neighbours."""
    if index == 0:
        return heads.mean(2)
    (row, column), first = np.divmod(diagonal(grid, index), grid.width), int(diagonal(grid, index - 1)[0]) // grid.width

    def head_logits(rows: np.ndarray, exists: np.ndarray, head: int) -> tuple[Tensor, Tensor]:
        """Return logits [R, W, V] from the neighbours in `rows`, and whether they exist, [W, 1]."""
        column_index = torch.as_tensor(np.where(exists, rows - first, 0), device=heads.device)
        return heads[:, column_index, head], torch.as_tensor(exists[:, None], device=heads.device)

    (left, has_left), (upper, has_upper) = head_logits(row, column > 0, 0), head_logits(row - 1, row > 0, 1)
    return torch.where(has_left & has_upper, (left + upper) / 2, torch.where(has_left, left, upper))
