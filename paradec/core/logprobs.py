"""Log-probabilities of tokens: what the distribution of the step that wrote a token said of it, and of the likeliest.

Which distribution that is, is the family's: of masked models softmax of the step's logits, after guidance and without
the tokens that are never proposed, whatever the temperature, filters and the method's own logits stage; of causal
models the verified target distribution p, after temperature and filters, at temperature 0 (where p is one-hot) that of
temperature 1 without filters. A sampler that takes tokens back may write a position several times: the last time
counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.rows import row_layout

SEGMENT = 256
"""Tokens of which the largest is found before the likeliest are looked for."""
CHUNK = 2**23
"""Logits that are held in float32 at a time."""


@dataclass
class StepLogProbs:
    """Of one step. Shapes: `R` rows, `W` positions, `k` alternatives."""

    chosen: Tensor
    """[R, W] float64: log-probability of the token that each position would take."""
    best: Tensor
    """[R, W, k] float64: of the likeliest tokens, in descending order."""
    best_tokens: Tensor
    """[R, W, k] int64: these."""
    tempered: Tensor | None = None
    """[R, W] float64: as `chosen`, at the temperature of the request; for rollouts alone."""

    @classmethod
    def of_logits(cls, logits: Tensor, tokens: Tensor, count: int, probability: Tensor | None = None) -> StepLogProbs:
        """Of softmax(logits [R, W, V]), for tokens [R, W] and the `count` likeliest. probability: [R, W] of the tokens,
        where it is known: logits are not read for it again."""
        flat, ids = logits.flatten(0, 1), tokens.reshape(-1, 1)
        size = max(1, CHUNK // max(1, flat.shape[-1]))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for part, own in zip(flat.split(size), ids.split(size), strict=True):
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            at = len(parts) * size
            if probability is None:
                total = part.logsumexp(-1, keepdim=True)
            else:
                said = probability.reshape(-1, 1)[at : at + len(part)]
                total = part.gather(-1, own).double() - said.log()
            best, best_tokens = _likeliest(part, count)
            parts.append(((part.gather(-1, own) - total).squeeze(-1), best - total, best_tokens))
        chosen, best, best_tokens = (torch.cat(each) for each in zip(*parts, strict=True))
        shape = tokens.shape
        return cls(chosen.double().view(shape), best.double().view(*shape, -1), best_tokens.view(*shape, -1))

    @classmethod
    def of_log(cls, log_p: Tensor, tokens: Tensor, count: int) -> StepLogProbs:
        """Of logarithms of probabilities [R, W, V], for tokens [R, W] and the `count` likeliest."""
        best, best_tokens = log_p.topk(count, -1)
        chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return cls(chosen.double(), best.double(), best_tokens)

    @classmethod
    def joined(cls, parts: list[StepLogProbs], order: Tensor | None = None) -> StepLogProbs:
        """Parts one after the other along the rows, in this order [R] int64."""
        if len(parts) == 1:
            return parts[0]
        names = NAMES if parts[0].tempered is None else (*NAMES, "tempered")
        every = [torch.cat([getattr(part, name) for part in parts]) for name in names]
        return cls(*(tensor if order is None else tensor[order] for tensor in every))

    @classmethod
    def in_rows(cls, parts: list[StepLogProbs], shape: torch.Size) -> StepLogProbs:
        """Parts [1, n] one after the other, as rows of this shape [R, W]."""
        return cls(*(torch.cat([getattr(part, name)[0] for part in parts]).unflatten(0, shape) for name in NAMES))

    @classmethod
    def picked(cls, steps: list[StepLogProbs], which: Tensor) -> StepLogProbs:
        """Of several steps, for each position that of number `which` [R, W]."""
        if len(steps) == 1:
            return steps[0]

        def pick(name: str) -> Tensor:
            every = torch.stack([getattr(step, name) for step in steps])
            index = which[None] if every.ndim == 3 else which[None, ..., None].expand(1, *every.shape[1:])
            return every.gather(0, index)[0]

        return cls(*(pick(name) for name in NAMES))

    def but(self, where: Tensor) -> StepLogProbs:
        """The same with nothing at `where` [R, W] bool: NaN, and the token -1."""
        wide = where.unsqueeze(-1)
        return StepLogProbs(
            self.chosen.masked_fill(where, torch.nan),
            self.best.masked_fill(wide, torch.nan),
            self.best_tokens.masked_fill(wide, -1),
        )

    def at(self, index: Tensor, column: Tensor) -> list[list[Any]]:
        """Entries as a trace has them, of positions (index [N], column [N]): [log-probability, [[token,
        log-probability], ...]], None for what is not finite. Waits for the device."""
        chosen, best, tokens = (getattr(self, name).cpu()[index, column].tolist() for name in NAMES)
        return [
            [_finite(own), [[token, _finite(value)] for token, value in zip(ids, values, strict=True)]]
            for own, values, ids in zip(chosen, best, tokens, strict=True)
        ]


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of [n, V] in descending order, and where they are. Of a large vocabulary they are in the
    segments that have the largest ones."""
    size = logits.shape[-1]
    whole = size // SEGMENT
    if size <= 2**13 or count > whole // 4:
        return logits.topk(count, -1)
    segments = logits[:, : whole * SEGMENT].unflatten(-1, (whole, SEGMENT))
    chosen = segments.amax(-1).topk(count, -1).indices.sort(-1).values
    rest = torch.arange(whole * SEGMENT, size, device=logits.device).expand(len(logits), -1)
    places = (chosen.unsqueeze(-1) * SEGMENT + torch.arange(SEGMENT, device=logits.device)).flatten(1)
    places = torch.cat((places, rest), -1)
    best, at = logits.gather(-1, places).topk(count, -1)
    return best, places.gather(-1, at)


NAMES = ("chosen", "best", "best_tokens")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass
class LogProbs:
    """Of a request's final tokens. Shapes: `B` rows, `L` columns (in an `Output` those of `sequences`), `k`
    alternatives."""

    chosen: Tensor = field(metadata=row_layout(columns=1, fill=math.nan))
    """[B, L] float64: the token's log-probability; NaN where none was decided (prompts, padding)."""
    best: Tensor = field(metadata=row_layout(columns=1, fill=math.nan))
    """[B, L, k] float64: of the likeliest tokens of that step, in descending order; NaN where none was decided."""
    best_tokens: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L, k] int64: these; -1 where none was decided."""
    step: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64: the row's step that wrote the token, from 0; -1 where none was decided."""

    @classmethod
    def empty(cls, rows: int, columns: int, count: int, device: torch.device) -> LogProbs:
        """Of a request that has not begun, with `count` alternatives."""
        nothing = torch.full((rows, columns), torch.nan, dtype=torch.float64, device=device)
        tokens = torch.full((rows, columns, count), -1, dtype=torch.int64, device=device)
        return cls(nothing, tokens.double().fill_(torch.nan), tokens, torch.full_like(nothing, -1, dtype=torch.int64))

    @property
    def count(self) -> int:
        """k."""
        return self.best.shape[-1]

    def sums(self) -> Tensor:
        """[B] float64: of each row's tokens together."""
        return self.chosen.nansum(1)

    def write(
        self, rows: np.ndarray, positions: Tensor, selected: Tensor, found: StepLogProbs, steps: np.ndarray | Tensor
    ) -> None:
        """Keep what a step said of the positions [R, W] that it wrote (selected [R, W] bool), which are distinct within
        a row. steps: [R], or [R, W], the rows' steps."""
        columns, device = self.chosen.shape[1], self.chosen.device
        index = torch.as_tensor(rows, device=device).unsqueeze(1)
        # as many as there are columns, those past the end wrap around: they stay distinct
        place, selected = positions[:, :columns] % columns, selected[:, :columns]
        when = torch.as_tensor(steps, device=device)
        when = (when.unsqueeze(1) if when.ndim == 1 else when[:, :columns]).expand(place.shape)
        for name, value in ((name, getattr(found, name)[:, :columns]) for name in NAMES):
            own = getattr(self, name)
            wide = selected if value.ndim == 2 else selected.unsqueeze(-1)
            own[index, place] = torch.where(wide, value, own[index, place])
        when = when.masked_fill(found.chosen[:, :columns].isnan(), -1)
        self.step[index, place] = torch.where(selected, when, self.step[index, place])

    def placed(self, place: Callable[[Tensor, Any], Tensor]) -> LogProbs:
        """Every tensor [B, L] as `place(tensor, fill)` gives it, of the alternatives one after the other."""

        def moved(tensor: Tensor, fill: Any) -> Tensor:
            if tensor.ndim == 2:
                return place(tensor, fill)
            parts = [place(part, fill) for part in tensor.unbind(-1)]
            return torch.stack(parts, -1) if parts else place(tensor[:, :, :0].sum(-1), 0).unsqueeze(-1)[..., :0]

        nan = torch.nan
        best, tokens = moved(self.best, nan), moved(self.best_tokens, -1)
        return LogProbs(moved(self.chosen, nan), best, tokens, moved(self.step, -1))

    def row(self, row: int) -> LogProbs:
        """Those of one row, [1, ...]."""
        return LogProbs(*(getattr(self, name)[row : row + 1] for name in (*NAMES, "step")))
