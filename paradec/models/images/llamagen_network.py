"""LlamaGen's network. Parameter names are those of the published checkpoints.

Three conventions of the published code that a plain Llama does not share: adjacent numbers of a head are rotated as
pairs, half of them by the row and half by the column of the token's own cell; the rotation of condition tokens is zero
in both cosine and sine, so that their queries and keys vanish and every query scores them 0; captions are padded on the
left, which changes nothing once the padding is left out, since the cell alone gives the angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, rms_norm, scaled_dot_product_attention, silu

from paradec.core.checks import check_choice, check_int, check_number
from paradec.models.images.blocks import mlp

CONDITIONS = ("c2i", "t2i")


@dataclass(frozen=True)
class LlamaGenConfig:
    """Sizes of a LlamaGen.

    Args:
        dim, n_layer, n_head: width, layers, heads (a head's width must be a multiple of 4).
        n_kv_head: heads of keys and values; as many as queries by default.
        ffn_dim: width of the feed-forward; by default 8/3 dim, rounded up to a multiple of `multiple_of`.
        grid: codes along one side of the square that it was trained on.
        condition: "c2i" (a class label) or "t2i" (features of a caption).
        num_classes: for c2i; label `num_classes` is the unconditional one.
        caption_dim, caption_length: for t2i: width of a feature, and the most features of a caption.
    """

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int | None = None
    ffn_dim: int | None = None
    multiple_of: int = 256
    vocab_size: int = 16384
    grid: int = 16
    condition: str = "c2i"
    num_classes: int = 1000
    caption_dim: int = 2048
    caption_length: int = 120
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        sizes = (
            "dim n_layer n_head multiple_of vocab_size grid num_classes caption_dim caption_length n_kv_head ffn_dim"
        )
        for name in sizes.split():
            check_int(name, getattr(self, name), low=1, none=name in ("n_kv_head", "ffn_dim"))
        check_choice("condition", self.condition, CONDITIONS)
        for name in ("rope_base", "norm_eps"):
            check_number(name, getattr(self, name), low=0, open_low=True)
        if self.dim % self.n_head or self.head_dim % 4:
            raise ValueError(f"n_head={self.n_head} must split dim={self.dim} into heads that are a multiple of 4 wide")
        if self.n_head % self.num_key_value_heads:
            raise ValueError(f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}")

    head_dim = property(lambda self: self.dim // self.n_head)
    # what stores are sized by, under transformers' names
    num_hidden_layers = property(lambda self: self.n_layer)
    num_attention_heads = property(lambda self: self.n_head)
    num_key_value_heads = property(lambda self: self.n_kv_head or self.n_head)
    hidden_size = property(lambda self: self.dim)

    @property
    def inner(self) -> int:
        """Width of the feed-forward."""
        return self.ffn_dim or self.multiple_of * math.ceil(int(8 * self.dim / 3) / self.multiple_of)


PRESETS: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "n_layer": 12, "n_head": 12},
    "L": {"dim": 1024, "n_layer": 24, "n_head": 16},
    "XL": {"dim": 1280, "n_layer": 36, "n_head": 20},
    "XXL": {"dim": 1536, "n_layer": 48, "n_head": 24},
    "XXXL": {"dim": 2560, "n_layer": 48, "n_head": 40},
    "1B": {"dim": 2048, "n_layer": 22, "n_head": 32},
    "3B": {"dim": 3200, "n_layer": 24, "n_head": 32},
    "7B": {"dim": 4096, "n_layer": 32, "n_head": 32},
}
"""Sizes by the authors' names; checkpoints are published of B, L, XL, XXL and 3B."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(_wide(x.dtype)), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.n_head, config.num_key_value_heads
        self.wqkv = nn.Linear(config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [R, heads, Q, head_dim]
        turned, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        q, k = rotate(turned, rotation).split((self.heads, self.kv_heads), 1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        h = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        return self.wo(h.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.inner, bias=False)
        self.w3 = nn.Linear(config.dim, config.inner, bias=False)
        self.w2 = nn.Linear(config.inner, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class LabelEmbedding(nn.Module):
    """Classes, and the unconditional label after them."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)


class CaptionEmbedding(nn.Module):
    """Features of captions, and learned ones in their stead for guidance."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.cap_proj = mlp(config.caption_dim, config.dim, config.dim, "tanh", bias=False)
        self.uncond_embedding = nn.Parameter(torch.zeros(config.caption_length, config.caption_dim))


class LlamaGen(nn.Module):
    """The network, without the codebook.

    Args:
        config: its sizes.
    """

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.config = config
        self.cls_embedding: LabelEmbedding | CaptionEmbedding = (
            LabelEmbedding(config) if config.condition == "c2i" else CaptionEmbedding(config)
        )
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def backbone(self, embeddings: Tensor, cells: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        """Hidden states before the output matrix.

        Args:
            embeddings: [R, Q, dim].
            cells: [R, Q] int64: the raster index of each token's cell; negative for condition tokens.
            mask: [R, 1, Q, K] bool, True where visible; None is causal over the call's own tokens.
            cache: what `update(keys, values, layer)` gives keys and values [R, kv_heads, K, head_dim] to attend over.

        Returns:
            [R, Q, dim].
        """
        rotation = angles(cells, self.config)
        x = embeddings
        for layer in self.layers:
            x = layer(x, rotation, mask, cache)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> logits [..., vocab_size], float32 or wider."""
        logits = self.output(hidden)
        return logits.to(_wide(logits.dtype))


def angles(cells: Tensor, config: LlamaGenConfig) -> Tensor:
    """Turns of pairs for the cells [R, Q]: complex [R, 1, Q, head_dim / 2] of length 1; 0 for condition tokens. Cells
    after the last one have its."""
    every = _angles(config.grid, config.head_dim // 2, config.rope_base, cells.device)
    return embedding(cells.clamp(-1, len(every) - 2) + 1, every).unsqueeze(1)


@lru_cache(maxsize=16)
def _angles(grid: int, half: int, base: float, device: torch.device) -> Tensor:
    """Of the condition's cell and all others [1 + grid * grid, half]: they are asked for at every call."""
    with torch.inference_mode(False):  # gradients may go through what is turned
        cells = torch.arange(grid * grid, device=device)
        frequency = base ** -(torch.arange(0, half, 2, device=device).float() / half)
        place = cells // grid, cells % grid
        angle = torch.cat([each.unsqueeze(-1) * frequency for each in place], -1)
        return pad(torch.complex(angle.cos(), angle.sin()), (0, 0, 1, 0))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the adjacent pairs of [R, heads, Q, head_dim]."""
    pairs = torch.view_as_complex(x.to(_wide(x.dtype)).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
