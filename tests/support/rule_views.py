"""Views and scores for rules, made by hand."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from paradec.samplers.masked.loop import LAST, View
from paradec.samplers.statistics import top_by_rank

INF = math.inf


def view_of(scores: Tensor) -> View:
    """A view of scores [R, W] whose candidates are those above -inf."""
    rows, width = scores.shape
    seen = {
        "scores": scores,
        "candidates": scores > -INF,
        "tokens": torch.zeros(rows, width, dtype=torch.int64),
        "positions": torch.arange(width).expand(rows, width) + 7,
        "quantities": {"confidence": scores},
        "top": top_by_rank,
    }
    # of the rest a rule without memory, schedule and draws has no use
    return View(**{field.name: None for field in fields(View)} | seen)


def random_scores(seed: int, entropies: bool = False) -> Tensor:
    """[12, W] scores, some with equal values, some positions decided; every row has a candidate, some only one."""
    generator = torch.Generator().manual_seed(seed)
    width = int(torch.randint(1, 40, (1,), generator=generator))
    scores = torch.rand(12, width, generator=generator, dtype=torch.float64)
    scores[::2] = (scores[::2] * 10).round() / 10
    if entropies:
        scores = -(3 * scores**3)
        scores[0] = LAST  # end tokens that are to come last
    decided = torch.rand(12, width, generator=generator) < torch.rand(12, 1, generator=generator)
    decided[torch.arange(12), torch.randint(width, (12,), generator=generator)] = False
    return scores.masked_fill(decided, -INF)
