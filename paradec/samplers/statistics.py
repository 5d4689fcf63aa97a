"""Statistics of logits (`paradec.kernels.token_stats`), under the names that samplers declare.

Scores are float64 on every path: trained models are so confident of many positions that float32 probabilities tie at 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import TokenDraws, path_for, read_stats

QUANTITIES = ("confidence", "margin", "negative_entropy", "minus_entropy", "best_token", "logit_gap")
FIELDS = {
    "margin": "margin",
    "negative_entropy": "smoothed_entropy",
    "minus_entropy": "entropy",
    "logit_gap": "gap",
}
"""What the quantities are called in `TokenStats`; entropies with the other sign, so that higher is more confident."""
IN_ONE_READ = FIELDS | {"negative_entropy": "entropy"}
"""The same where a second read, or a second logarithm, would cost more than the first."""


def token_statistics(
    logits: Tensor,
    reads: tuple[str, ...],
    tokens: Tensor | None = None,
    draws: TokenDraws | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Statistics of each position's distribution softmax(logits / temperature).

    Args:
        logits: [..., V] of any float dtype; -inf excludes a token.
        reads: which of `QUANTITIES` to compute.
        tokens: [...] int64: "confidence" is the probability of these; None takes the best token (lowest id on ties).
        draws: asks for tokens that are drawn, instead.
        temperature: above 0; divides all logits, those of "logit_gap" too.

    Returns:
        The tokens [...] int64, and the quantities by name, each [...] float64: "confidence" p(token), "margin"
        p(1st) - p(2nd), "minus_entropy" sum p ln p, "negative_entropy" sum p ln(p + 1e-10) (Dream's form; higher is
        more confident), "best_token" the likeliest token (int64), "logit_gap" z(1st) - z(2nd). All but the last two are
        NaN where a logit is NaN or +inf. Large vocabularies, which are read in float32, have sum p ln p in place of
        Dream's form: less by 1e-10 a token at most, where its second logarithm would cost more than all else.
    """
    exact = "negative_entropy" not in reads or path_for(logits) == "float64"
    fields = FIELDS if exact else IN_ONE_READ
    stats = read_stats(logits, _wanted(reads, exact), temperature, ids=tokens, draws=draws)
    prob: Tensor | None = stats.prob
    if draws is not None:
        tokens, prob = stats.sample, stats.sample_prob
    elif tokens is not None:
        prob = stats.ids_prob
    quantities: dict[str, Tensor] = {}
    for name in reads:
        if name == "confidence":
            assert prob is not None  # of the tokens that were asked for
            quantities[name] = prob
        elif name == "best_token":
            quantities[name] = stats.token
        else:
            value = getattr(stats, fields[name])
            if name == "logit_gap" and temperature != 1:
                value = value / temperature
            quantities[name] = -value if name.endswith("entropy") else value
    return stats.token if tokens is None else tokens, quantities


@lru_cache(maxsize=64)
def _wanted(reads: tuple[str, ...], exact: bool) -> frozenset[str]:
    fields = FIELDS if exact else IN_ONE_READ
    return frozenset(fields[name] for name in reads if name in fields)


def best_with_probability(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token [...] (int64) of logits [..., V], and its probability [...], in float32 at least: enough where it
    is not compared with a threshold, and cheap."""
    if path_for(logits) != "float64":
        stats = read_stats(logits, frozenset())
        return stats.token, stats.prob
    # a small vocabulary takes half the time of float64 in float32
    best = logits.argmax(-1, keepdim=True)
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return best.squeeze(-1), p.gather(-1, best).squeeze(-1)


def top_by_rank(scores: Tensor, count: np.ndarray | Tensor) -> Tensor:
    """The `count` highest scores of each row; equal scores go to the lower index.

    Args:
        scores: [R, W], -inf where not eligible.
        count: [R] int64, on the host or the device.

    Returns:
        [R, W] bool; never an ineligible entry.
    """
    if isinstance(count, np.ndarray):
        if set(count.tolist()) == {1}:  # one token a step needs no sort
            at = scores.argmax(-1, keepdim=True)
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, at, scores.gather(-1, at) > -torch.inf)
        count = torch.as_tensor(count, device=scores.device)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    return torch.zeros_like(within).scatter(-1, order, within) & (scores > -torch.inf)


def best_one(scores: Tensor) -> Tensor:
    """The highest score of each row [R, W] (the lowest index on ties), as a [R, W] bool mask."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), True)
