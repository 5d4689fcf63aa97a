"""LLaDA's and Dream's networks in plain tensor operations."""

from typing import Any

import torch
from checkpoints import DREAM_PARTS, LLADA_PARTS
from torch import Tensor
from torch.nn.functional import silu


class Net:
    """LLaDA or Dream in float64. A call evaluates some positions; a store keeps the keys and values."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]):
        self.weights = {name: value.double() for name, value in weights.items()}
        weights, llada = self.weights, config["model_type"] == "llada"
        if llada:
            self.layers, self.heads, tied = config["n_layers"], config["n_heads"], config.get("weight_tying", True)
            self.kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else self.heads)
            self.parts, self.layer = LLADA_PARTS, "model.transformer.blocks.{}."
            first, last, head = (f"model.transformer.{name}" for name in ("wte", "ln_f", "ff_out"))
        else:
            self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
            self.kv_heads, tied = config["num_key_value_heads"], config.get("tie_word_embeddings", False)
            self.parts, self.layer = DREAM_PARTS, "model.layers.{}."
            first, last, head = "model.embed_tokens", "model.norm", "lm_head"
        self.embedding, self.last = weights[f"{first}.weight"], weights[f"{last}.weight"]
        self.head = self.embedding if tied else weights[f"{head}.weight"]
        self.width, self.eps = self.embedding.shape[1] // self.heads, config.get("rms_norm_eps", 1e-5)
        # angles in float32, as in all implementations: rounding is part of the model
        frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.outer(torch.arange(200).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().double(), angles.sin().double()

    def __call__(
        self, ids: Tensor, positions: Tensor | None = None, store: dict | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """Return logits of ids [n] at `positions`, which attend to each other and to stored positions in `visible`."""
        positions = torch.arange(len(ids)) if positions is None else positions
        x, w = self.embedding[ids], self.weights

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            x = x.float()  # the modeling files compute only the norm in float32
            return (x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).double() * weight

        def rotate(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return x * self.cos[positions] + torch.cat((-right, left), -1) * self.sin[positions]

        for index in range(self.layers):
            name = self.layer.format(index)

            def linear(x: Tensor, part: str, name: str = name) -> Tensor:
                return x @ w[f"{name}{self.parts[part]}.weight"].T + w.get(f"{name}{self.parts[part]}.bias", 0)

            h = norm(x, w[f"{name}{self.parts['attn_norm']}.weight"])
            q, k, v = (
                linear(h, part).view(len(ids), count, self.width).transpose(0, 1)
                for part, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            pair = torch.stack((rotate(k), v))
            if visible is not None:
                others = [p for p in visible.nonzero()[:, 0].tolist() if p not in positions.tolist()]
                keys, values = torch.cat((pair, store[index][:, :, others]), 2)
            else:
                keys, values = pair
            if store is not None:
                if index not in store:
                    store[index] = torch.zeros(2, self.kv_heads, 200, self.width, dtype=torch.float64)
                store[index][:, :, positions] = pair
            keys, values = (t.repeat_interleave(self.heads // self.kv_heads, 0) for t in (keys, values))
            attention = (rotate(q) @ keys.transpose(1, 2) / self.width**0.5).softmax(-1) @ values
            x = x + linear(attention.transpose(0, 1).reshape(len(ids), -1), "o")
            h = norm(x, w[f"{name}{self.parts['mlp_norm']}.weight"])
            x = x + linear(silu(linear(h, "gate")) * linear(h, "up"), "down")
        return norm(x, self.last) @ self.head.T
