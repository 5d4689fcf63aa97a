"""EAGLE drafters: one decoder layer that predicts a model's next hidden state.

Li et al., arXiv 2401.15077, section 4.1. EAGLE-2 (arXiv 2406.16858) and LANTERN (arXiv 2410.03355) have the same
network.

A position's feature is the model's last hidden state, after the final norm. Column i of the drafter reads the feature
of position i - 1 and the embedding of token i, and predicts the feature of position i. The model's output matrix
converts this prediction to logits, and column i + 1 reads it. A prompt's first token has no column. Column i has the
rotary angles of position i - 1; if the model is a LlamaGen, those of the token's cell.

A published folder has config.json (a Llama's, `num_hidden_layers` 1) and model.safetensors or pytorch_model.bin with
embed_tokens.weight, fc.weight, optionally fc.bias, and layers.0: a Llama's layer without its first norm (Qwen2's
drafters: with biases on q, k and v)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from paradec.caches.store import KeyValueStore
from paradec.core.checks import short_repr
from paradec.core.query import Query, take_columns
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.checkpoint import CheckpointError, check_fit, read_positive
from paradec.models.drafter import (
    FeatureDrafter,
    build_config,
    check_base_sizes,
    make_drafter,
    read_angles,
    read_layer_fields,
)
from paradec.models.images.llamagen import LlamaGenModel, angles


class EagleHead(nn.Module):
    """The network; parameters are named as in published checkpoints. bias: for `fc`. qkv_bias: for q, k and v."""

    def __init__(self, config: LlamaConfig, bias: bool = False, qkv_bias: bool = False):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        for name in ("q_proj", "k_proj", "v_proj") if qkv_bias else ():
            linear = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(linear.in_features, linear.out_features))
        self.layers = nn.ModuleList([layer])

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Features [R, Q, D] of the tokens' positions.

        tokens: [R, Q] int64. features: [R, Q, D], of the position before each token.
        rotation: cosine and sine [R, Q, head_dim].
        mask: [R, 1, Q, K] bool, True where visible; None is causal over the call's columns.
        cache: `update(keys, values, layer)` returns keys and values to attend to."""
        embedded = self.embed_tokens(tokens).to(features.dtype)
        x = self.fc(torch.cat((embedded, features), -1))
        layer = self.layers[0]
        return layer(x, attention_mask=mask, position_embeddings=rotation, **cache_keyword(layer, cache))


class EagleDrafter(FeatureDrafter):
    """An EAGLE head over the model that it was trained for, as `drafter` of the sampler "speculative". A bad head
    lowers acceptance; outputs stay exact.

    As in the public code for image models, an id beyond the drafter's vocabulary (a condition) is embedded as id 0, and
    guidance mixes conditional and unconditional logits. Unlike in that code, padding of captions is masked.

    module: the network. base: the model, loaded or wrapped."""

    def __init__(self, module: EagleHead, base: Model, name: str = "EAGLE"):
        super().__init__(module, base, name)
        config = module.config
        check_base_sizes(name, base, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        self.rotary = LlamaRotaryEmbedding(config).to(self.device)
        self.cell_config = None  # for LlamaGen's rotary angles: its configuration with the drafter's heads
        if isinstance(base, LlamaGenModel):
            heads = {"n_head": config.num_attention_heads, "n_kv_head": config.num_key_value_heads}
            self.cell_config = dataclasses.replace(base.module.config, **heads)

    def __call__(self, query: Query, features: Tensor, store: KeyValueStore) -> tuple[Tensor, Tensor]:
        """Logits [R, W, V] of the wanted columns, and the predicted features [R, W, D]. Positions are at least 1.

        query: must set `visible`.
        features: [R, Q, D]: the feature of the position before each column; for a draft's column, the predicted feature
            of its parent."""
        with torch.no_grad():
            features = features.to(self.device, self.dtype)
            cache = store.bind(query)
            mask, _ = store.visible(query)  # causal, since no slot after the columns is filled
            tokens = torch.where(query.tokens < self.facts.vocab_size, query.tokens, 0)
            hidden = self.module(tokens, features, self._rotation(query, features), mask, cache)
            hidden = (hidden if query.wanted is None else take_columns(hidden, query.wanted)).to(self.base.dtype)
            return self.base.head(hidden), hidden

    def _rotation(self, query: Query, features: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, Q, head_dim]."""
        if self.cell_config is None:
            return self.rotary(features, (query.positions - 1).clamp(min=0))
        rotation = torch.view_as_real(angles(self.base.cells(query), self.cell_config)).unbind(-1)
        cos, sin = (torch.cat((half, half), -1).squeeze(1).to(features.dtype) for half in rotation)
        return cos, sin


# ---- files ----------------------------------------------------------------------------------------------------------


def load_eagle(
    source: str, config: Mapping[str, Any], weights: dict[str, Tensor], base: Model, dtype: torch.dtype | None
) -> EagleDrafter:
    """Load an EAGLE drafter, as `load_drafter` does."""
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise CheckpointError(
            f"config.json of {source!r}: num_hidden_layers={short_repr(layers)}; EAGLE's drafters have 1"
        )
    check_base_sizes(source, base, **{name: read_positive(config, name) for name in ("hidden_size", "vocab_size")})
    layer_config = build_layer_config(source, config)
    module = EagleHead(layer_config, "fc.bias" in weights, "layers.0.self_attn.q_proj.bias" in weights)
    check_fit(module.state_dict(), weights, source, "config.json")
    if isinstance(base, LlamaGenModel):
        for name, tensor in weights.items():  # reorder rows: LlamaGen rotates adjacent pairs, a Llama rotates halves
            if name.startswith(("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj")):
                heads = tensor.unflatten(0, (-1, layer_config.head_dim))
                weights = weights | {name: torch.cat((heads[:, ::2], heads[:, 1::2]), 1).flatten(0, 1)}
    module = module.to(base.device, dtype or base.dtype).requires_grad_(False)
    module.load_state_dict(weights)
    return make_drafter(EagleDrafter, source, module, base)


def build_layer_config(source: str, config: Mapping[str, Any]) -> LlamaConfig:
    """Read the config of a drafter's layer. Raises CheckpointError for a field that is missing or out of its range."""
    return build_config(
        source,
        LlamaConfig,
        **read_layer_fields(source, config, max_position_embeddings=2048),
        vocab_size=read_positive(config, "vocab_size"),
        num_hidden_layers=1,
        rope_parameters=read_angles(source, config, 10000.0),
        attention_bias=False,
        mlp_bias=False,
        attn_implementation="sdpa",
    )
