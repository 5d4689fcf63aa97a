"""Random tokens of a canvas, and draws from its distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from paradec.core import rng

FIRST_STREAM, NOISE_STREAM = 4, 5
"""Draws of the tokens that a canvas opens with, and of those that replace what a step does not keep.
(`paradec.core.rng` and `paradec.samplers.causal.base` have the other streams.)"""
BLOCK = 512
"""Tokens whose probabilities are summed before the token among them is looked for."""


def noise(keys: Tensor, step: Tensor, positions: Tensor, vocab: int, stream: int) -> Tensor:
    """[R, C] int64: a uniform token for each position. keys [R, 2], step [R], positions [R, C]: as in `rng.uniform`."""
    found = rng.uniform(keys, step, positions, 1, stream).squeeze(-1)
    return (found * vocab).long()


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """[N] int64: a token of each distribution softmax(logits [N, V]), by its cumulative sums at uniform [N] in (0, 1).

    One number a draw instead of one for every token. Probabilities are float32 at least, as transformers has them;
    their sums are float64.
    """
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p = torch.nn.functional.pad(p, (0, -p.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    blocks = p.sum(-1, dtype=torch.float64).cumsum(-1)
    at = uniform.unsqueeze(-1) * blocks[:, -1:]
    block = _index(blocks, at)
    before = torch.where(block > 0, blocks.gather(-1, (block - 1).clamp(min=0)), 0)
    within = p.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1).cumsum(-1, dtype=torch.float64)
    return (block * BLOCK + _index(within, at - before)).squeeze(-1)


def _index(sums: Tensor, at: Tensor) -> Tensor:
    """[N, 1]: where the ascending sums [N, K] first exceed at [N, 1]; where rounding has none do so, the last place
    that adds something."""
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(sums, at.contiguous(), right=True).minimum(last)
