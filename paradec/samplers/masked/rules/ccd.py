"""Coherent contextual decoding (CCD, arXiv 2512.02044) as in the paper; `ccd_agree` follows its public code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.distributions import safe_log
from paradec.samplers.masked.loop import Needs, Stage, View
from paradec.samplers.masked.rules.low_confidence import LowConfidence
from paradec.samplers.statistics import best_with_probability

MAX_HISTORY = 64
MAX_DISTRIBUTIONS = 256
"""Limit of stored distributions per row: 130 MB at 126,464 tokens."""


@dataclass(frozen=True)
class CCD(LowConfidence):
    """Per row, commit the masked positions whose averaged distribution has the lowest entropy.

    Every step stores the distributions of its `buffer` most confident positions. A position's distribution is averaged
    over this step and those of the previous `history - 1` steps that had the position in their buffer. If these steps
    disagree, the average is flat: its entropy is the mean entropy plus the disagreement. Tokens are chosen from the
    average, too.

    The linear schedule gives the number of positions to commit (the paper's budget); without `steps` it is 1. With an
    entropy_threshold (CCD-DS), a step also commits the positions in its buffer with at most this entropy.

    Args:
        history: d, number of averaged steps, including this one, at most 64; 1 is the entropy rule. The presets have
            the paper's values: 3 for Dream and 2 for LLaDA.
        buffer: V, positions stored per step, at least 1; (history - 1) * buffer is at most 256.
        entropy_threshold: in nats, at least 0; None commits only by the schedule (CCD). The paper gives no value. The
            default, 0.3, is about the entropy of a token with probability 0.9 and one alternative.

    Confidence is the probability of the best token. A step's buffer has only positions that the cache evaluates in this
    step. (history - 1) * buffer distributions are stored in float32: 4 MB per row at the defaults and 126,464 tokens.
    """

    history: int = 3
    buffer: int = 4
    entropy_threshold: float | None = 0.3

    name = "ccd"
    paper = "CCD"
    arxiv = "2512.02044"
    summary = "the tokens whose distribution, averaged over the last steps, has the lowest entropy"
    needs = Needs(score="minus_entropy")
    may_exceed_plan = True
    sweep = ({"entropy_threshold": 0.1}, {"entropy_threshold": 1.0, "buffer": 8})
    presets = {"llada": {"history": 2}, "dream": {"history": 3}}

    def __post_init__(self) -> None:
        check_int("history", self.history, low=1, high=MAX_HISTORY)
        check_int("buffer", self.buffer, low=1, high=MAX_DISTRIBUTIONS // max(self.history - 1, 1))
        check_number("entropy_threshold", self.entropy_threshold, low=0, none=True)

    def memory(self) -> Mapping[str, MemorySpec]:
        if self.history == 1:
            return {}
        shape = (self.history - 1, self.buffer)
        return {
            "columns": MemorySpec(shape, torch.int64, fill=-1),  # window columns; -1 for an empty entry
            **{name: MemorySpec((self.buffer, "vocab")) for name in self._distribution_names},
        }

    @property
    def _distribution_names(self) -> list[str]:
        """Memory names of the previous steps' distributions, the latest first."""
        return [f"distributions_{age}" for age in range(1, self.history)]

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        confidence = best_with_probability(logits)[1].masked_fill(~stage.undecided, -torch.inf)
        confidence, columns = confidence.topk(min(self.buffer, logits.shape[1]), dim=1)  # [R, <= buffer]
        is_masked = confidence > -torch.inf
        updates = {"buffered": torch.zeros_like(stage.undecided).scatter(1, columns, is_masked)}
        if self.history == 1:
            return logits, updates
        columns = pad(columns.masked_fill(~is_masked, -1), (0, self.buffer - columns.shape[1]), value=-1)
        newest = select_columns(logits, columns.clamp(min=0))
        newest = newest.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
        newest.masked_fill_((columns < 0).unsqueeze(-1), 0)
        distributions = [newest, *(stage.memory[name] for name in self._distribution_names[:-1])]
        updates |= {
            "columns": torch.cat((columns.unsqueeze(1), stage.memory["columns"][:, :-1]), 1),
            **dict(zip(self._distribution_names, distributions, strict=True)),
        }
        return self._average(logits, stage), updates

    def _average(self, logits: Tensor, stage: Stage) -> Tensor:
        """Replace logits [R, W, V] by log averages at undecided positions among the E entries of earlier buffers."""
        earlier = torch.cat([stage.memory[name] for name in self._distribution_names], 1)  # [R, E, V]
        earlier_columns = stage.memory["columns"].flatten(1)  # [R, E]
        window = torch.arange(logits.shape[1], device=logits.device).unsqueeze(1)
        count = (earlier_columns.unsqueeze(1) == window).sum(-1).where(stage.undecided, 0)  # [R, W]
        max_columns = min(earlier_columns.shape[1], logits.shape[1])
        if logits.is_cpu:  # on an accelerator, reading the number would wait for the device
            max_columns = int((count > 0).sum(1).amax())
        columns = count.topk(max_columns, dim=1).indices  # [R, U]: U = max_columns distinct columns
        count = count.gather(1, columns).unsqueeze(-1)
        logits_at_columns = select_columns(logits, columns)
        logits_at_columns = logits_at_columns.to(torch.promote_types(logits_at_columns.dtype, torch.float32))
        is_same_column = (columns.unsqueeze(-1) == earlier_columns.unsqueeze(1)).to(earlier.dtype)  # [R, U, E]
        mean = (logits_at_columns.softmax(-1) + is_same_column @ earlier) / (1 + count)
        averaged = torch.where(count > 0, safe_log(mean), logits_at_columns)
        logits = logits.to(averaged.dtype, copy=True)
        logits[torch.arange(len(logits), device=logits.device).unsqueeze(1), columns] = averaged
        return logits

    def select(self, view: View) -> Tensor:
        selected = view.top(view.scores, view.quota)
        if self.entropy_threshold is None:
            return selected
        return selected | view.updates["buffered"] & (view.scores >= -self.entropy_threshold)


def select_columns(logits: Tensor, columns: Tensor) -> Tensor:
    """Select columns [R, U] of logits [R, W, V]: [R, U, V]."""
    return logits[torch.arange(len(columns), device=logits.device).unsqueeze(1), columns]
