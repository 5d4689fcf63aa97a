"""The best token of a position, and the positions with the highest scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import path_for, read_stats


def best_with_probability(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best token [...] int64 of logits [..., V], and its probability [...], at least float32."""
    if path_for(logits) != "float64":
        stats = read_stats(logits, frozenset())
        return stats.token, stats.prob
    # for small vocabularies, float32 takes half the time of float64
    best = logits.argmax(-1, keepdim=True)
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return best.squeeze(-1), p.gather(-1, best).squeeze(-1)


def top_by_rank(scores: Tensor, count: np.ndarray | Tensor | int) -> Tensor:
    """Select the `count` ([R], or an int for all rows) highest scores of each row, except -inf: [R, W] bool. Ties go to
    the lower index."""
    if isinstance(count, np.ndarray):
        if set(count.tolist()) == {1}:  # one token per row needs no sort
            best = scores.argmax(-1, keepdim=True)
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, scores.gather(-1, best) > -torch.inf)
        count = torch.as_tensor(count, device=scores.device)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    is_in_top = (ranks < (count if isinstance(count, int) else count.unsqueeze(-1))).expand_as(scores)
    return torch.zeros_like(is_in_top).scatter(-1, order, is_in_top) & (scores > -torch.inf)
