"""Coherent contextual decoding: positions are judged by the average of their last distributions.

"CCD", arXiv 2512.02044, as the paper has it; `ccd_agree` is what its public code does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import check_int, check_number
from paradec.core.contract import CanvasState
from paradec.core.memory import MemorySpec
from paradec.kernels.token_stats import path_for, recycled
from paradec.samplers.averages import Averages
from paradec.samplers.distributions import log_of
from paradec.samplers.masked.base import Needs, Stage, View
from paradec.samplers.masked.rules.low_confidence import LowConfidence
from paradec.samplers.statistics import best_with_probability, statistics_where, token_statistics
from paradec.samplers.unread import Read

MOST_HISTORY = 64
MOST_DISTRIBUTIONS = 256
"""A row keeps at most so many: 130 MB at 126,464 tokens."""


@dataclass(frozen=True)
class CCD(LowConfidence):
    """Per row, commit the masked positions whose averaged distribution has the lowest entropy.

    Every step keeps the distributions of its `buffer` most confident positions. A position's average is over this
    step's distribution and those of the previous `history - 1` steps that had the position in their buffer. If these
    steps disagree, the average is flat: its entropy is the mean entropy plus the disagreement. Tokens are chosen from
    the average, too.

    The schedule gives the number of positions (the paper's budget; one, without `steps`). With an entropy_threshold
    (CCD-DS), positions in this step's buffer whose entropy is at most this threshold are committed too, so up to
    `buffer` at once.

    Args:
        history: d, steps averaged over, this one included, at most 64; 1 is the entropy rule. 3 for Dream and 2 for
            LLaDA in the paper: the presets.
        buffer: V, positions kept per step, at least 1; (history - 1) * buffer is at most 256.
        entropy_threshold: nats, at least 0; None commits by the schedule alone (CCD). The paper gives no number; 0.3 is
            ours, about the entropy of a token at 0.9 with one alternative.

    Confidence is the probability of the best token. Positions that a cache leaves out of a step are not in its buffer;
    distributions of earlier steps still age.

    Keeps (history - 1) * buffer distributions in float32: 4 MB a row at the defaults and 126,464 tokens.
    """

    history: int = 3
    buffer: int = 4
    entropy_threshold: float | None = 0.3

    name = "ccd"
    paper = "CCD"
    arxiv = "2512.02044"
    summary = "the tokens whose distribution, averaged over the last steps, has the lowest entropy"
    needs = Needs(score="minus_entropy")
    sweep = ({"entropy_threshold": 0.1}, {"entropy_threshold": 1.0, "buffer": 8})
    presets = {"llada": {"history": 2}, "dream": {"history": 3}}

    def __post_init__(self) -> None:
        check_int("history", self.history, low=1, high=MOST_HISTORY)
        check_int("buffer", self.buffer, low=1, high=MOST_DISTRIBUTIONS // max(self.history - 1, 1))
        check_number("entropy_threshold", self.entropy_threshold, low=0, none=True)

    def memory(self) -> Mapping[str, MemorySpec]:
        if self.history == 1:
            return {}
        shape = (self.history - 1, self.buffer)
        return {
            "columns": MemorySpec(shape, torch.int64, fill=-1),  # of the window; -1 where there was no position left
            **{name: MemorySpec((self.buffer, "vocab")) for name in self._ages},
        }

    @property
    def _ages(self) -> list[str]:
        """The memories of the distributions of the last steps, the last one first."""
        return [f"distributions_{age}" for age in range(1, self.history)]

    def quota(self, state: CanvasState, rows: np.ndarray) -> np.ndarray:
        return np.maximum(super().quota(state, rows), 1)

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor | Read, Mapping[str, Tensor]]:
        found: dict[str, Tensor] = {}
        small, at_once = path_for(logits) == "float64", logits.is_cpu
        if small:  # which is read again at no cost
            tokens, confidence = best_with_probability(logits)
        elif at_once:
            tokens, found = statistics_where(logits, self.needs.reads, stage.undecided, stage.current)
            confidence = found["confidence"]
        else:
            tokens, found = token_statistics(logits, self.needs.reads)
            confidence = found["confidence"]
        confidence = confidence.masked_fill(~stage.undecided, -torch.inf)
        confidence, columns = confidence.topk(min(self.buffer, logits.shape[1]), dim=1)  # [R, <= buffer]
        there = confidence > -torch.inf
        updates = {"buffered": torch.zeros_like(stage.undecided).scatter(1, columns, there)}
        if self.history == 1:
            return (Averaged(logits, tokens, found) if found else logits), updates
        columns = pad(columns.masked_fill(~there, -1), (0, self.buffer - columns.shape[1]), value=-1)
        kept = distributions_at(logits, columns)
        ages = [stage.memory[name] for name in self._ages]
        updates |= {
            "columns": torch.cat((columns.unsqueeze(1), stage.memory["columns"][:, :-1]), 1),
            **dict(zip(self._ages, [kept, *ages[:-1]], strict=True)),
        }
        read = Averaged(logits, tokens, found, lambda: self.averaged(logits, stage))
        if small:
            return read.written(), updates
        if at_once:
            self._read_averages(read, stage, kept, columns)
            return read, updates
        changed, now = self.averaged(logits, stage)
        if changed.shape[1]:
            own_tokens, own = token_statistics(now, self.needs.reads)
            tokens = tokens.scatter(1, changed, own_tokens)
            found = {name: value.scatter(1, changed, own[name]) for name, value in found.items()}
        return Averaged(logits, tokens, found, lambda: (changed, now)), updates

    def _read_averages(self, read: Averaged, stage: Stage, kept: Tensor, columns: Tensor) -> None:
        """Put the statistics of averages where there are some. kept: [R, buffer, V], this step's distributions at
        columns [R, buffer]."""
        logits, ages = read.logits, [stage.memory[name] for name in self._ages]
        averages = Averages(logits.shape[-1])
        undecided, buffered = stage.undecided.tolist(), columns.tolist()
        found = [each.numpy() for each in (read.best, read.found["confidence"], read.found["minus_entropy"])]
        for row, past in enumerate(stage.memory["columns"].tolist()):
            for column in sorted(
                {column for step in past for column in step if column >= 0 and undecided[row][column]}
            ):
                earlier = [age[row, step.index(column)] for age, step in zip(ages, past, strict=True) if column in step]
                if column in buffered[row]:
                    now = kept[row, buffered[row].index(column)]
                else:
                    now = torch.softmax(logits[row, column], -1, dtype=torch.float32, out=averages.spare)
                for field, value in zip(found, averages.of([now, *earlier]), strict=True):
                    field[row, column] = value

    def averaged(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
        """Distinct columns [R, U], among them all undecided ones that earlier steps put aside, and the logits [R, U, V]
        of the averages there. Of a column that no earlier step put aside they are as they were."""
        earlier = torch.cat([stage.memory[name] for name in self._ages], 1)  # [R, E, V]
        at = stage.memory["columns"].flatten(1)  # [R, E]
        width = logits.shape[1]
        count = (at.unsqueeze(1) == torch.arange(width, device=at.device).unsqueeze(1)).sum(-1)  # [R, W]
        count = count.where(stage.undecided, 0)
        most = min(at.shape[1], width)
        if at.is_cpu:  # nobody waits for it
            most = int((count > 0).sum(1).amax())
        columns = count.topk(most, dim=1).indices  # [R, U]
        count = count.gather(1, columns).unsqueeze(-1)
        now = rows_at(logits, columns)
        now = now.to(torch.promote_types(now.dtype, torch.float32))
        same = (columns.unsqueeze(-1) == at.unsqueeze(1)).to(earlier.dtype)  # [R, U, E]
        mean = (now.softmax(-1) + same @ earlier) / (1 + count)
        return columns, torch.where(count > 0, log_of(mean), now)

    def select(self, view: View) -> Tensor:
        selected = view.top(view.scores, view.quota)
        if self.entropy_threshold is None:
            return selected
        return selected | view.updates["buffered"] & (view.scores >= -self.entropy_threshold)


@dataclass(frozen=True)
class Averaged(Read):
    """Logits [R, W, V] of which some columns are averages; what was read of all is in `found`."""

    averages: Callable[[], tuple[Tensor, Tensor]] | None = None
    """Columns [R, U] int64, distinct in a row, and the averages [R, U, V] there."""

    def written(self) -> Tensor:
        if self.averages is None:
            return self.logits
        columns, averages = self.averages()
        index = columns.unsqueeze(-1).expand_as(averages)
        return self.logits.to(averages.dtype).scatter(1, index, averages)


def distributions_at(logits: Tensor, columns: Tensor) -> Tensor:
    """softmax of [R, W, V] at columns [R, N], in float32; -1 is nothing, and 0 on the CPU."""
    if not logits.is_cpu:
        kept = rows_at(logits, columns.clamp(min=0))
        return kept.softmax(-1, dtype=torch.promote_types(kept.dtype, torch.float32)).float()
    kept = recycled((*columns.shape, logits.shape[-1]))
    for row, at in enumerate(columns.tolist()):
        for index, column in enumerate(at):
            if column < 0:
                kept[row, index].zero_()
            elif logits.dtype == torch.float64:
                kept[row, index] = logits[row, column].softmax(-1)
            else:
                torch.softmax(logits[row, column], -1, dtype=torch.float32, out=kept[row, index])
    return kept


def rows_at(logits: Tensor, columns: Tensor) -> Tensor:
    """[R, W, V] at columns [R, U] -> [R, U, V]."""
    if len(columns) == 1:  # whole rows are taken, not numbers one by one
        return logits.index_select(1, columns[0])
    return logits.gather(1, columns.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
