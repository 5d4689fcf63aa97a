"""`read_stats`: the choice of a path."""

from __future__ import annotations

import torch
from torch import Tensor

from paradec.kernels import has_triton
from paradec.kernels.token_stats.draws import TokenDraws
from paradec.kernels.token_stats.float64 import float64_samples, float64_stats
from paradec.kernels.token_stats.portable import chunked_stats
from paradec.kernels.token_stats.reference import FIELDS, TokenStats

SMALL_VOCABULARY = 2**13
"""Largest vocabulary that "float64" serves whatever the dtype: its cost is little beside any forward."""
IN_ONE_READ = frozenset(FIELDS) - {"smoothed_entropy"}
"""Fields of the Triton kernel: a logarithm of p + 1e-10 takes the normalized p, and so a second read."""


def read_stats(
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: TokenDraws | None = None,
    path: str | None = None,
) -> TokenStats:
    """`token_stats` without its checks, for callers at every step."""
    path = path or path_for(logits, wanted)
    if path == "triton":
        # imported here: `import paradec` must not import triton
        from paradec.kernels.token_stats.triton import triton_stats

        return triton_stats(logits, wanted, temperature, ids, draws)
    logits = logits.detach()
    if path == "chunked":
        stats = chunked_stats(logits, wanted, temperature, draws)
    else:
        stats = float64_stats(logits, wanted, temperature)
        if draws is not None:
            stats = stats._replace(sample=float64_samples(logits, draws.uniform(), draws.temperature))
    if ids is not None:
        stats = stats._replace(ids_prob=_probabilities(logits, ids, stats, temperature))
    if stats.sample is not None:
        stats = stats._replace(sample_prob=_probabilities(logits, stats.sample, stats, temperature))
    return stats


def path_for(logits: Tensor, fields: frozenset[str] = IN_ONE_READ) -> str:
    """Name of the path that serves these logits; depends on dtype, vocabulary and device, never on the number of
    rows."""
    if logits.dtype == torch.float64 or logits.shape[-1] <= SMALL_VOCABULARY:
        return "float64"
    return "triton" if logits.is_cuda and fields <= IN_ONE_READ and has_triton() else "chunked"


def _probabilities(logits: Tensor, ids: Tensor, stats: TokenStats, temperature: float) -> Tensor:
    """Probabilities of tokens `ids` [...] or [..., K] of logits [..., V], shaped as `ids`."""
    chosen = logits.gather(-1, ids.reshape(*logits.shape[:-1], -1)).double()
    top = logits.gather(-1, stats.token.unsqueeze(-1)).double()
    return (((chosen - top) / temperature).exp() * stats.prob.unsqueeze(-1)).view(ids.shape)
