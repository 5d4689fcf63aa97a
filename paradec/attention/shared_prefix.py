"""Attention over a prefix that all rows share, and over each row's own keys. Juravsky et al., "Hydragen:
High-Throughput LLM Inference with Shared Prefixes", arXiv 2402.05099, section 3."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SCORES = 2**24
"""Largest number of scores over a shared prefix in memory at a time."""


def attend_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    prefix: tuple[Tensor, Tensor],
    scaling: float | None = None,
) -> Tensor:
    """Compute softmax attention over a shared prefix and each row's own keys. For the prefix, one product per key/value
    head serves all rows. The two partial outputs are merged by their log-sum-exps.

    Args:
        query: [R, heads, Q, head_dim], for R rows of Q queries. key, value: [R, kv_heads, K, head_dim], for K own keys.
        mask: [R, 1, Q or 1, K] bool over the rows' own keys, True where visible; None: all visible.
        prefix: keys and values [P, kv_heads, head_dim] of P positions, for all rows.
        scaling: None means head_dim ** -0.5.

    Returns [R, Q, heads, head_dim] in the dtype of `value`; softmax in float32 or wider."""
    (rows, heads, columns, width), groups = query.shape, key.shape[1]
    scaling = width**-0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)

    # [R, kv_heads, heads per group * Q, head_dim]
    row_output, row_lse = _attend_part(query.reshape(rows, groups, -1, width), key, value, scaling, mask)
    row_output, row_lse = row_output.reshape(query.shape), row_lse.reshape(rows, heads, columns)

    # [kv_heads, heads per group * R * Q, head_dim]: one product for the columns of all rows
    all_queries = query.transpose(0, 1).reshape(groups, -1, width)
    shared_keys, shared_values = (tensor.to(value.dtype).transpose(0, 1) for tensor in prefix)
    size = max(1, MAX_SCORES // (groups * shared_keys.shape[1]))
    chunks = [_attend_part(chunk, shared_keys, shared_values, scaling) for chunk in all_queries.split(size, dim=1)]
    shared_output, shared_lse = (torch.cat(tensors, 1) for tensors in zip(*chunks, strict=True))
    shared_output = shared_output.reshape(heads, rows, columns, width).transpose(0, 1)
    shared_lse = shared_lse.reshape(heads, rows, columns).transpose(0, 1)

    total = torch.logaddexp(row_lse, shared_lse)
    row_weight, shared_weight = ((lse - total).exp().unsqueeze(-1) for lse in (row_lse, shared_lse))
    output = row_output * row_weight + shared_output * shared_weight
    return output.to(value.dtype).transpose(1, 2).contiguous()


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of N queries [..., N, head_dim] over keys [..., K, head_dim]. Returns the output [..., N, head_dim] and
    log-sum-exps [..., N] in float32 or wider. mask: [R, 1, Q or 1, K]; with a mask, N is heads per group * Q."""
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min  # -inf would give NaN for a padding column, whose keys are all masked
        by_head = scores.unflatten(2, (-1, mask.shape[2])) if mask.shape[2] > 1 else scores.unsqueeze(2)
        scores = by_head.masked_fill(~mask.unsqueeze(2), lowest).flatten(2, 3)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    return (weights @ value).to(scores.dtype), lse
