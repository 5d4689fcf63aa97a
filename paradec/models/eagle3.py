"""EAGLE-3 drafters: one layer over the outputs of three layers of the model, with its own vocabulary.

Li et al., arXiv 2503.01840; EAGLE-3.1, arXiv 2605.09992. One matrix fuses three layers' outputs at a position into a
feature. The attention reads the feature of position i - 1 and the embedding of token i, each normed, as one vector. The
layer's output is the next feature. The drafter's output matrix may cover only some of the model's tokens.

Two formats are read: that of the paper's code (`midlayer.`, a flat config.json) and speculators'
(`speculators_model_type` "eagle3", sizes in `transformer_layer_config`). In both formats, a layer number l means that
layer's input, the output of layer l - 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from paradec.caches.store import KeyValueStore
from paradec.core.checks import short_repr
from paradec.core.query import Query, take_columns
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.checkpoint import CheckpointError, check_fit, check_object, check_supported, read_flag
from paradec.models.drafter import (
    TABLES,
    FeatureDrafter,
    check_base_sizes,
    check_layers,
    make_drafter,
    read_input_layers,
    read_token_map,
)
from paradec.models.eagle import build_layer_config

SUPPORTED = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


@dataclass(frozen=True)
class Eagle3Settings:
    """Settings of a drafter besides its sizes.

    layers: model layers, from 0, whose outputs are read. For a model of n layers, n means the last layer's output
        before the final norm.
    norm_before_residual: whether the residual branch starts from the normed feature.
    norm_output: whether the next feature is normed (3.1)."""

    layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Layer(nn.Module):
    """The decoder layer, whose attention reads a token and a feature as one vector."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Any]):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        attention_class: Any = Qwen3Attention if "midlayer.self_attn.q_norm.weight" in weights else LlamaAttention
        config.layer_types = ["full_attention"]
        self.self_attn = attention_class(config, 0)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(self.self_attn, name)
            num_inputs = linear.in_features if name == "o_proj" else 2 * width
            bias = f"midlayer.self_attn.{name}.bias" in weights
            setattr(self.self_attn, name, nn.Linear(num_inputs, linear.out_features, bias=bias))
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(width, eps) for _ in range(3)
        )

    def forward(
        self, embedded: Tensor, feature: Tensor, normed_residual: bool, rotation: Any, mask: Any, cache: Any
    ) -> Tensor:
        """embedded, feature [R, Q, D] -> [R, Q, D]."""
        normed = self.hidden_norm(feature)
        inputs = torch.cat((self.input_layernorm(embedded), normed), -1)
        cache_argument = cache_keyword(self.self_attn, cache)
        output = self.self_attn(inputs, attention_mask=mask, position_embeddings=rotation, **cache_argument)[0]
        x: Tensor = (normed if normed_residual else feature) + output
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """The network; parameter names are those of the paper's code.

    weights: the file's, which determine the optional parts. base_width: width of the model's hidden states."""

    def __init__(self, config: LlamaConfig, settings: Eagle3Settings, weights: Mapping[str, Any], base_width: int):
        super().__init__()
        self.config, self.settings = config, settings
        width, count, eps = config.hidden_size, len(settings.layers), config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if "embed_tokens.weight" in weights else None
        self.input_norm = LlamaRMSNorm(count * base_width, eps) if "input_norm.weight" in weights else None
        norms = (LlamaRMSNorm(base_width, eps) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if "fc_norm.0.weight" in weights else None
        self.fc = nn.Linear(count * base_width, width, bias="fc.bias" in weights)
        self.midlayer = Eagle3Layer(config, weights)
        self.norm = LlamaRMSNorm(width, eps)
        rows = weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else 0
        self.lm_head = nn.Linear(width, rows, bias=False) if rows else None

    def fuse(self, features: Tensor) -> Tensor:
        """Outputs of layers [R, F, layers * base_width] at F positions -> features [R, F, D]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(
        self, embedded: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any
    ) -> Tensor:
        """The layer's output [R, Q, D] for embedded tokens and fused features, each [R, Q, D]."""
        return self.midlayer(embedded, features, self.settings.norm_before_residual, rotation, mask, cache)


class Eagle3Drafter(FeatureDrafter):
    """An EAGLE-3 head over the model that it was trained for, as `drafter` of the sampler "speculative". A bad head
    lowers acceptance; outputs stay exact.

    module: the network. base: the model, loaded or wrapped.
    tokens: [Vd] int64: the model's id of each of the drafter's Vd tokens; None if these are all of the model's."""

    def __init__(self, module: Eagle3Head, base: Model, tokens: Tensor | None = None, name: str = "EAGLE-3"):
        super().__init__(module, base, name)
        check_layers("layers", module.settings.layers, base, has_final=True)
        self.tokens = None if tokens is None else tokens.to(self.device)
        self.keep_layers = module.settings.layers
        self.rotary = LlamaRotaryEmbedding(module.config).to(self.device)

    def fuse(self, features: Tensor) -> Tensor:
        """Outputs of the layers `keep_layers` [R, F, layers * base_width] -> features [R, F, D]."""
        with torch.no_grad():
            return self.module.fuse(features.to(self.device, self.dtype))

    def __call__(self, query: Query, features: Tensor, store: KeyValueStore) -> tuple[Tensor, Tensor]:
        """Logits [R, W, V] of the W wanted columns (-inf for tokens that the drafter lacks), and their next features
        [R, W, D]. query: must set `visible`. features: [R, Q, D]: fused features of the position before each column."""
        with torch.no_grad():
            cache = store.bind(query)
            mask, _ = store.visible(query)
            table = self.module.embed_tokens
            rows = self.base.token_embeddings() if table is None else table.weight
            embedded = nn.functional.embedding(query.tokens.to(self.device), rows).to(features.dtype)
            rotation = self.rotary(features, (query.positions - 1).clamp(min=0))
            hidden = self.module(embedded, features, rotation, mask, cache)
            hidden = hidden if query.wanted is None else take_columns(hidden, query.wanted)
            normed = self.module.norm(hidden)
            if self.module.lm_head is None:
                logits = self.base.head(normed.to(self.base.dtype))
            else:
                logits = self.expand_logits(self.module.lm_head(normed).to(self.base.dtype))
            return logits, normed if self.module.settings.norm_output else hidden


# ---- files ----------------------------------------------------------------------------------------------------------


def load_eagle3(
    source: str, config: Mapping[str, Any], weights: dict[str, Tensor], base: Model, dtype: torch.dtype | None
) -> Eagle3Drafter:
    """Load an EAGLE-3 drafter, as `load_drafter` does."""
    name = "transformer_layer_config"
    fields = check_object(name, config.get(name, config), f"config.json of {source!r}")
    if fields.get("num_hidden_layers", 1) != 1:
        layers = short_repr(fields["num_hidden_layers"])
        raise CheckpointError(f"config.json of {source!r}: num_hidden_layers={layers}; EAGLE-3's drafters have 1")
    size_name = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    base_sizes = {
        size_name: config.get("target_hidden_size") or fields.get("hidden_size"),
        "vocab_size": fields.get("vocab_size"),
    }
    check_base_sizes(source, base, **base_sizes)
    layer_config = build_layer_config(source, fields)
    settings = _read_settings(source, config, base)
    weights = {key.replace("layers.0.", "midlayer.", 1): tensor for key, tensor in weights.items()}
    tables = {key: weights.pop(key) for key in TABLES if key in weights}
    width = base.hidden_size
    assert width is not None  # checked by `check_base`
    module = Eagle3Head(layer_config, settings, weights, width)
    check_fit(module.state_dict(), weights, source, "config.json")
    tokens = read_token_map(source, tables, None if module.lm_head is None else module.lm_head.out_features, base)
    if module.embed_tokens is None and layer_config.hidden_size != base.hidden_size:
        raise CheckpointError(
            f"{source!r} has no embed_tokens.weight, and hidden_size={layer_config.hidden_size} is not "
            f"{base.hidden_size}, the width of the embeddings of {base.facts.name}, which would be used instead"
        )
    module = module.to(base.device, dtype or base.dtype).requires_grad_(False)
    module.load_state_dict(weights)
    return make_drafter(Eagle3Drafter, source, module, base, tokens)


def _read_settings(source: str, config: Mapping[str, Any], base: Model) -> Eagle3Settings:
    where = f"config.json of {source!r}"
    eagle_config = check_object("eagle_config", config.get("eagle_config") or {}, where)
    check_supported(eagle_config, SUPPORTED, f"{where}: eagle_config")
    name, count = "eagle_aux_hidden_state_layer_ids", base.text_config.num_hidden_layers
    inputs = config.get(name) or eagle_config.get(name) or [2, count // 2, count - 3]
    return Eagle3Settings(
        read_input_layers(source, name, inputs, base),
        norm_before_residual=bool(read_flag(config, "norm_before_residual", False)),
        norm_output=bool(read_flag(config, "norm_output", False)),
    )
