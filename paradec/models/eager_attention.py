"""Attention without a causal mask, written out: softmax in float32 or wider, and its weights are returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The attention of `paradec.models.attention.sdpa`, and its weights [R, heads, Q, K]."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key.to(value.dtype), groups), repeat_kv(value, groups)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.to(value.dtype) @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights
