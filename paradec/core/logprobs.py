"""Log-probabilities of the tokens that a step writes, and of the step's likeliest tokens. If several steps write to a
position, the last one counts.

Masked models: softmax of the step's logits after guidance, without suppressed tokens; temperature, filters and the
sampler's changes to logits have no effect. Causal models: the target distribution p that verifies drafts, after
temperature and filters; at temperature 0, the distribution p of temperature 1 without filters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.rows import row_layout

SEGMENT = 256
"""Length of a segment of the vocabulary; `_top_k` first compares the maxima of segments."""
CHUNK = 2**23
"""Number of logits that are converted to float32 at a time."""
NAMES = ("chosen", "best", "best_tokens")


@dataclass
class StepLogProbs:
    """Log-probabilities of one step. Shapes: `R` rows, `W` positions, `k` alternatives."""

    chosen: Tensor
    """[R, W] float64: log-probabilities of the proposed tokens."""
    best: Tensor
    """[R, W, k] float64: log-probabilities of the likeliest tokens, descending."""
    best_tokens: Tensor
    """[R, W, k] int64: the likeliest tokens."""
    at_temperature: Tensor | None = None
    """[R, W] float64: `chosen` at the request's temperature, for rollouts."""

    @classmethod
    def from_logits(cls, logits: Tensor, tokens: Tensor, count: int, probability: Tensor | None = None) -> StepLogProbs:
        """Compute the log softmax of logits [R, W, V] at tokens [R, W] and at the `count` likeliest tokens.
        probability: [R, W], the probabilities of `tokens`, if known."""
        flat, ids = logits.flatten(0, 1), tokens.reshape(-1, 1)
        size = max(1, CHUNK // max(1, flat.shape[-1]))
        known = [None] * len(flat) if probability is None else [*probability.reshape(-1, 1).split(size)]
        parts = []
        for part, index, p in zip(flat.split(size), ids.split(size), known):
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            chosen = part.gather(-1, index)
            total = part.logsumexp(-1, keepdim=True) if p is None else chosen.double() - p.log()
            best, best_tokens = _top_k(part, count)
            parts.append(((chosen - total).squeeze(-1), best - total, best_tokens))
        chosen, best, best_tokens = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        shape = tokens.shape
        return cls(chosen.double().view(shape), best.double().view(*shape, -1), best_tokens.view(*shape, -1))

    @classmethod
    def from_log_probabilities(cls, log_p: Tensor, tokens: Tensor, count: int) -> StepLogProbs:
        """Select the values of tokens [R, W] and of the `count` likeliest tokens in log-probabilities [R, W, V]."""
        best, best_tokens = log_p.topk(count, -1)
        chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return cls(chosen.double(), best.double(), best_tokens)

    @classmethod
    def combine(cls, parts: Sequence[StepLogProbs], function: Callable[[list[Tensor]], Tensor]) -> StepLogProbs:
        """Combine parts field by field: apply `function` to the list of the parts' tensors."""
        names = [entry.name for entry in fields(cls) if getattr(parts[0], entry.name) is not None]
        return cls(**{name: function([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def concatenate(cls, parts: Sequence[StepLogProbs], order: Tensor | None = None) -> StepLogProbs:
        """Concatenate parts along the rows, then reorder by `order` [R] int64."""
        if len(parts) == 1:
            return parts[0]
        return cls.combine(parts, lambda tensors: torch.cat(tensors)[slice(None) if order is None else order])

    @classmethod
    def select_steps(cls, steps: Sequence[StepLogProbs], index: Tensor) -> StepLogProbs:
        """Take the values of each position from the step that `index` [R, W] int64 selects."""
        rows, columns = (torch.arange(size, device=index.device) for size in index.shape)
        return cls.combine(steps, lambda tensors: torch.stack(tensors)[index, rows.unsqueeze(1), columns])

    def fill(self, where: Tensor) -> StepLogProbs:
        """Where `where` [R, W] bool is True, replace log-probabilities by NaN and tokens by -1."""
        filled = replace(self)
        for name, tensor in vars(self).items():
            if tensor is not None:
                mask = where if tensor.ndim == 2 else where.unsqueeze(-1)
                setattr(filled, name, tensor.masked_fill(mask, torch.nan if tensor.is_floating_point() else -1))
        return filled

    def to_lists(self, index: Tensor, column: Tensor) -> list[list[Any]]:
        """List an entry [log-probability, [[token, log-probability], ...]] for each (index [N], column [N]), as in a
        trace: None replaces a log-probability that is not finite. Waits for the device."""
        log_p = (tensor.cpu()[index, column].numpy() for tensor in (self.chosen, self.best))
        chosen, best = (np.where(np.isfinite(values), values, np.array(None)).tolist() for values in log_p)
        tokens = self.best_tokens.cpu()[index, column].tolist()
        return [
            [value, [list(pair) for pair in zip(ids, values, strict=True)]]
            for value, values, ids in zip(chosen, best, tokens, strict=True)
        ]


def _top_k(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the `count` largest logits of [n, V], descending, and their columns. Searches a large V by segments."""
    size = logits.shape[-1]
    num_segments = size // SEGMENT
    if size <= 2**13 or count > num_segments // 4:
        return logits.topk(count, -1)
    segments = logits[:, : num_segments * SEGMENT].unflatten(-1, (num_segments, SEGMENT))
    chosen = segments.amax(-1).topk(count, -1).indices.sort(-1).values
    remainder = torch.arange(num_segments * SEGMENT, size, device=logits.device).expand(len(logits), -1)
    columns = (chosen.unsqueeze(-1) * SEGMENT + torch.arange(SEGMENT, device=logits.device)).flatten(1)
    columns = torch.cat((columns, remainder), -1)
    best, index = logits.gather(-1, columns).topk(count, -1)
    return best, columns.gather(-1, index)


@dataclass
class LogProbs:
    """Log-probabilities of a request's final tokens. Shapes: `B` rows, `L` columns (in an `Output` those of
    `sequences`), `k` alternatives."""

    chosen: Tensor = field(metadata=row_layout(columns=1, fill=math.nan))
    """[B, L] float64: log-probability of the final token; NaN where no token was decided (prompts, padding)."""
    best: Tensor = field(metadata=row_layout(columns=1, fill=math.nan))
    """[B, L, k] float64: log-probabilities of the likeliest tokens, descending, in the step that wrote the final token;
    NaN where `chosen` is NaN."""
    best_tokens: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L, k] int64: the tokens of `best`; -1 where no token was decided."""
    step: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: the row's step that wrote the token, from 0; -1 where no token was decided."""

    @classmethod
    def empty(cls, rows: int, columns: int, count: int, device: torch.device) -> LogProbs:
        undecided = torch.full((rows, columns), torch.nan, dtype=torch.float64, device=device)
        tokens = torch.full((rows, columns, count), -1, dtype=torch.int64, device=device)
        return cls(
            undecided, tokens.double().fill_(torch.nan), tokens, torch.full_like(undecided, -1, dtype=torch.int64)
        )

    @property
    def count(self) -> int:
        """Number of alternatives."""
        return self.best.shape[-1]

    def sums(self) -> Tensor:
        """[B] float64: sum of `chosen` over each row's tokens."""
        return self.chosen.nansum(1)

    def write(
        self, rows: np.ndarray, positions: Tensor, selected: Tensor, values: StepLogProbs, steps: np.ndarray | Tensor
    ) -> None:
        """Write a step's values to `rows` [R] at `positions` [R, W], distinct within a row, where `selected` [R, W] is
        True. steps: the rows' steps, [R] or [R, W]."""
        row_steps = torch.as_tensor(steps, device=self.step.device)
        row_steps = (row_steps.unsqueeze(1) if row_steps.ndim == 1 else row_steps).expand(positions.shape)
        for name in NAMES:
            write_columns(getattr(self, name), rows, positions, selected, getattr(values, name))
        write_columns(self.step, rows, positions, selected, row_steps.masked_fill(values.chosen.isnan(), -1))

    def map_columns(self, function: Callable[[Tensor, Any], Tensor]) -> LogProbs:
        """Apply `function(tensor, fill)` to `chosen`, `step` and every alternative, each [B, L]."""
        chosen = function(self.chosen, torch.nan)

        def map_alternatives(tensor: Tensor, fill: Any) -> Tensor:
            parts = [function(part, fill) for part in tensor.unbind(-1)]
            return torch.stack(parts, -1) if parts else chosen.new_empty(*chosen.shape, 0, dtype=tensor.dtype)

        best, tokens = map_alternatives(self.best, torch.nan), map_alternatives(self.best_tokens, -1)
        return LogProbs(chosen, best, tokens, function(self.step, -1))

    def row(self, row: int) -> LogProbs:
        return replace(self, **{name: tensor[row : row + 1] for name, tensor in vars(self).items()})


def write_columns(target: Tensor, rows: np.ndarray, positions: Tensor, selected: Tensor, values: Tensor) -> None:
    """Write values [R, W, ...] to `target` [B, L, ...] at rows [R], positions [R, W], if `selected` [R, W] is True."""
    columns, index = target.shape[1], torch.as_tensor(rows, device=target.device).unsqueeze(1)
    # a position past the last column becomes a column by modulo; rows are cut to L entries, so that none is set twice
    column, selected, values = positions[:, :columns] % columns, selected[:, :columns], values[:, :columns]
    selected = selected if values.ndim == 2 else selected.unsqueeze(-1)
    target[index, column] = torch.where(selected, values, target[index, column])
