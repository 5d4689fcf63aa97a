"""Attention without a causal mask, registered with transformers.

Importing this module imports transformers' attention registry (and triton, where installed); `import paradec` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from paradec.attention.shared_prefix import attend_shared
from paradec.models.cache_argument import thread


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """As `sdpa`, but also return the attention weights [R, heads, Q, K]."""
    group_size = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key.to(value.dtype), group_size), repeat_kv(value, group_size)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.to(value.dtype) @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    wide_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide_dtype).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


PREFIX = "paradec_"


def sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run PyTorch's scaled dot product attention over every visible key.

    query: [R, heads, Q, head_dim]. key, value: [R, kv_heads, K, head_dim].
    attention_mask: [R, 1, Q or 1, K] bool, True where visible; None sees everything.
    Returns [R, Q, heads, head_dim], and None in place of weights."""
    kwargs.pop("is_causal", None)
    # float32 rotary angles (LLaDA's rope_full_precision) make queries and keys float32: cast to the model's dtype
    query, key = query.to(value.dtype), key.to(value.dtype)
    return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=False, **kwargs)


def with_extras(function: Any) -> Any:
    """Add two arguments to an attention function: `shared_prefix`, with keys and values that all rows see
    (`caches.kept_prefix`), and `attention_plan` (`WindowQuery.attention`)."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        thread.attention_flag.value = True  # the adapter checks that the module calls this function
        _check_extras(kwargs, key.shape[2])
        if attention_mask is not None and attention_mask.numel() == 1:
            attention_mask = None  # the decoder's `SEE_ALL`, or the mask of a single key
        plan, shared = kwargs.pop("attention_plan", None), kwargs.pop("shared_prefix", None)
        if plan is None and shared is None:
            return function(module, query, key, value, attention_mask, **kwargs)

        def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            if shared is None:
                return function(module, query, key, value, mask, **kwargs)[0]
            return attend_shared(query, key, value, mask, shared.read_layer(module.layer_idx), kwargs.get("scaling"))

        if plan is None:
            return dense(query, key, value, attention_mask), None
        return plan.attend(dense, module.layer_idx, query, key, value, attention_mask, kwargs.get("scaling")), None

    return attention


def _check_extras(kwargs: dict[str, Any], length: int) -> None:
    """Raise ValueError for arguments that plain attention would wrongly ignore."""
    for name in ("softcap", "s_aux", "position_bias", "indices"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported without a causal mask")
    window = kwargs.get("sliding_window")
    if window is not None and length > window:
        raise ValueError(f"sliding_window={window} is shorter than the {length} positions that must see each other")


def full_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Mask function for transformers: only padding hides keys. attention_mask: [R, K] -> [R, 1, 1, K] bool."""
    return None if attention_mask is None else attention_mask.bool()[:, None, None, :kv_length]


IMPLEMENTATIONS = {"sdpa": with_extras(sdpa), "eager": with_extras(eager), "sparsed": with_extras(sdpa)}
"""Attention functions by their names in `load` and `wrap`. For "sparsed", `Model.default_attention` adds SparseD."""
for _name, _function in IMPLEMENTATIONS.items():
    AttentionInterface.register(PREFIX + _name, _function)
    AttentionMaskInterface.register(PREFIX + _name, full_mask)
