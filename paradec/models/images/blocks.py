"""The transformer block of MAR, LPD and U-ViT; parameter names are timm's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Self-attention with one matrix for queries, keys and values. layer: index of its keys and values in a store."""

    def __init__(self, width: int, heads: int, layer: int, bias: bool = True):
        super().__init__()
        self.heads, self.layer = heads, layer
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, store: Any = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [R, heads, Q, d]
        if store is not None:
            key, value = store.update(key, value, self.layer)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(output.transpose(1, 2).flatten(2))


def mlp(width: int, inner: int, out: int, approximate: str = "none", bias: bool = True) -> nn.Sequential:
    fc1, fc2 = nn.Linear(width, inner, bias=bias), nn.Linear(inner, out, bias=bias)
    return nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(approximate), fc2=fc2))


class Block(nn.Module):
    """A pre-norm transformer block. layer: index in a store. inner: width of the feed-forward, by default 4 `width`."""

    def __init__(
        self, width: int, heads: int, layer: int, eps: float = 1e-5, inner: int | None = None, bias: bool = True
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads, layer, bias)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp(width, inner or 4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, store: Any = None) -> Tensor:
        """x [R, Q, width]; mask [R or 1, 1, Q or 1, K] bool, True where visible, None shows everything;
        `store.update(keys, values, layer)` returns keys and values [R, heads, K, head width]."""
        x = x + self.attn(self.norm1(x), mask, store)
        return x + self.mlp(self.norm2(x))
