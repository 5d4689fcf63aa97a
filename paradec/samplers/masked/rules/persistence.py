"""Persistence: also commit nearly certain tokens that have stayed the best (CORA-Diff, 2026, public scripts)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import LAST, Needs, View
from paradec.samplers.masked.rules.low_confidence import LowConfidence


@dataclass(frozen=True)
class Persistence(LowConfidence):
    """Per row, commit as `low_confidence` does, and also every masked position with confidence >= threshold whose best
    token has been the same for `persist` steps, including this one.

    Args:
        threshold: confidence that a token needs to be committed in addition to the schedule, in [0, 1].
        persist: required number of consecutive steps with the same best token, at least 1.
        end_threshold: confidence that an end token needs, in [0, 1]. If every candidate is an end token below this, the
            best position becomes final anyway.

    The model's best token counts, even if another token is drawn at temperature > 0. A position that a cache does not
    evaluate in a step keeps its count. `steps` bounds the model calls only with end_threshold=0, since end tokens below
    the threshold may leave a step with too few candidates. With pipelined blocks (without `steps`), each block that
    must make progress commits its most confident token.
    """

    threshold: float = 0.97
    persist: int = 2
    end_threshold: float = 0.8

    name = "persistence"
    paper = "CORA-Diff"
    arxiv = ""
    summary = "the most confident tokens on schedule, and confident tokens that have stayed the best"
    needs = Needs(reads=("best_token",), least_by_steps=True)
    may_exceed_plan = True
    sweep = ({"threshold": 0.9}, {"threshold": 0.7})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_int("persist", self.persist, low=1)
        check_number("end_threshold", self.end_threshold, low=0, high=1)

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"best": MemorySpec(("window",), torch.int64, fill=-1), "run": MemorySpec(("window",), torch.int64)}

    def select(self, view: View) -> Tensor:
        is_early_end = torch.isin(view.tokens, view.ends) & (view.scores < self.end_threshold) & view.candidates
        scores = view.scores.masked_fill(is_early_end, LAST)
        scheduled = view.scheduled(scores)
        persistent = (scores >= self.threshold) & (self.run_lengths(view) >= self.persist)
        return (scheduled | persistent) & (scores > LAST) | view.best(scores)

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        best = torch.where(view.candidates, view.quantities["best_token"], view.memory["best"])
        return {"best": best, "run": self.run_lengths(view)}

    def run_lengths(self, view: View) -> Tensor:
        """Count the consecutive steps in which a position has had its best token, including this one: [R, W] int64."""
        is_same = view.quantities["best_token"] == view.memory["best"]
        return torch.where(view.candidates, torch.where(is_same, view.memory["run"] + 1, 1), view.memory["run"])
