"""Heads for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2): decoder layers that draft.

Column i of a head reads token i and the model's last hidden state at i - 1 (after the final norm). Both are normed
and joined by one matrix; a decoder layer of the model's class and a norm follow. The output is the next hidden state,
which the model's output matrix converts to logits. A single head runs repeatedly, like EAGLE, and drafts chains or
trees. Of several heads, head k makes draft k: its columns are one position further right than those of head k - 1.

Three layouts are read: `model.layers.N.` after the model's layers (DeepSeek-V3, GLM-4 MoE), `mtp.` (Qwen3-Next, Mellum)
and `mtp_layers.N.` (MiMo, speculators). The matrix reads (hidden state, token) in the last layout, else (token, hidden
state). Copies of the model's embeddings and output matrix are not read."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paradec.caches.store import KeyValueStore
from paradec.core.checks import short_repr
from paradec.core.query import Query, take_columns
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.causal import count_mtp_layers, find_mtp_weights
from paradec.models.checkpoint import (
    CheckpointError,
    check_dtypes,
    check_fit,
    check_object,
    read_tensors,
    read_weight_headers,
)
from paradec.models.drafter import FeatureDrafter, check_base
from paradec.models.layers import decoder_layers, require_decoder_layers
from paradec.models.saving import file_weights

MATCHING_FIELDS = (
    *("hidden_size", "vocab_size", "model_type", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta"),
)
"""Fields that must equal the model's if stated in config.json (speculators: in its `transformer_layer_config`)."""


class MtpLayer(nn.Module):
    """One head. template_layer: index of the model's layer whose form `block` has. index: index of the head."""

    def __init__(self, config: Any, layer_class: Any, norm_class: Any, template_layer: int, index: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm_class(width, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = layer_class(config, template_layer)
        for part in self.block.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index  # its layer in the store

    def forward(self, embedded: Tensor, states: Tensor, hidden_first: bool, **kwargs: Any) -> Tensor:
        """Embedded tokens and hidden states, each [R, Q, D] -> output states [R, Q, D]. kwargs: for `block`."""
        parts = (self.enorm(embedded), self.hnorm(states))
        output = self.block(self.eh_proj(torch.cat(parts[::-1] if hidden_first else parts, -1)), **kwargs)
        return self.norm(output[0] if isinstance(output, tuple) else output)


class MtpNetwork(nn.Module):
    """All heads. hidden_first: whether `eh_proj` reads (hidden state, token) instead of (token, hidden state)."""

    def __init__(self, base: Model, count: int, hidden_first: bool):
        super().__init__()
        layers = require_decoder_layers(base)
        self.config, self.hidden_first = copy.deepcopy(base.text_config), hidden_first
        self.config._attn_implementation = "sdpa"
        last_layer: Any = layers[-1]
        template = type(last_layer), type(last_layer.input_layernorm), len(layers) - 1
        self.layers = nn.ModuleList(MtpLayer(self.config, *template, index) for index in range(count))
        self.config.num_hidden_layers = count


class MtpDrafter(FeatureDrafter):
    """The heads of a model that was trained with them, as `drafter` of the sampler "speculative". A single head drafts
    chains of any length (`window`) and trees; several heads draft one token each.

    module: the network. base: the model, loaded or wrapped."""

    fills: ClassVar[str] = "layers"

    def __init__(self, module: MtpNetwork, base: Model, name: str = "MTP"):
        super().__init__(module, base, name)
        check_mtp_base(base)

    @property
    def num_reread(self) -> int:
        """Number of last columns that the next call evaluates again, because later heads read drafts in them."""
        return len(self.module.layers) - 1

    @property
    def slots(self) -> int | None:
        """Slots of a window: the next token and a draft of each head; None for one head, which makes any number."""
        return len(self.module.layers) + 1 if self.num_reread else None

    def __call__(self, query: Query, features: Tensor, store: KeyValueStore, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Logits [R, W, V] of the wanted columns, and the outputs [R, W, D] (with several heads, of all columns:
        [R, Q, D]). Positions are at least 1.

        query: must set `visible`. Positions and slots are those of head 0; tokens are `layer` positions further right.
        features: [R, Q, D]: outputs of the previous head. For head 0: the model's hidden states one position before
            each column, or for a draft's column the head's output at the draft's parent.
        layer: index of the head."""
        with torch.no_grad():
            cache = store.bind(query)
            mask, _ = store.visible(query)
            features, positions = features.to(self.device, self.dtype), query.positions + layer
            embedded = self.base.module.get_input_embeddings()(query.tokens).to(features)
            network = self.module.layers[layer]
            hidden = network(
                embedded,
                features,
                self.module.hidden_first,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self._rotation(features, positions),
                **cache_keyword(network.block, cache),
            )
            wanted = hidden if query.wanted is None else take_columns(hidden, query.wanted)
            return self.base.head(wanted.to(self.base.dtype)), hidden if self.num_reread else wanted

    def _rotation(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        config, kinds = self.module.config, {}
        if "full_attention" in (getattr(config, "rope_parameters", None) or {}):  # angles by kind of layer
            kinds = {"layer_type": "full_attention"}
        return self.base.module.get_decoder().rotary_emb(features, positions, **kinds)


def check_mtp_base(base: Any) -> None:
    """Raise TypeError or ValueError for a model that MTP heads cannot draft for."""
    check_base(base)
    decoder = getattr(base.module, "get_decoder", lambda: None)()
    layers = decoder_layers(base)
    if layers is None or not hasattr(decoder, "rotary_emb") or not hasattr(layers[-1], "input_layernorm"):
        raise ValueError(
            f"base {base.facts.name} has no list of decoder layers in transformers' usual form, which MTP heads need"
        )


# ---- files ----------------------------------------------------------------------------------------------------------


def load_mtp(
    source: str, config: Mapping[str, Any], base: Model, dtype: torch.dtype | None, revision: str | None
) -> MtpDrafter:
    """Load heads of a model's own checkpoint, or in speculators' format, as `load_drafter` does."""
    check_mtp_base(base)
    _check_config(source, config, base)
    headers = read_weight_headers(source, revision)
    names = find_mtp_weights(headers, config).module_names
    count = 1 + max((int(module_name.split(".")[1]) for module_name in names.values()), default=-1)
    num_stated = count_mtp_layers(config)
    if not count:
        raise CheckpointError(
            f"{source!r} has no weights of MTP heads (model.layers.{base.text_config.num_hidden_layers}.eh_proj, "
            "mtp.fc or mtp_layers.0.input_proj)"
        )
    if num_stated not in (0, count):
        raise CheckpointError(f"config.json of {source!r} states {num_stated} MTP layers; the weights have {count}")
    check_dtypes(source, {name: headers[name].dtype for name in names})
    with torch.device("meta"):
        module = MtpNetwork(base, min(count, len(headers)), any(".input_proj." in name for name in names))
    check_fit(
        _weight_slots(module),
        {module_name: headers[name] for name, module_name in names.items()},
        f"{source} (MTP)",
        "config.json",
    )
    unstored = [name for name, _ in module.named_buffers() if name not in module.state_dict()]
    if unstored:
        raise CheckpointError(f"{source!r}: layers of {base.facts.name} have the unsupported buffer {unstored[0]}")
    module = module.to(dtype or base.dtype)
    if dtype == torch.float64:  # kernels of experts have no float64
        module.config._experts_implementation = "eager"
    for part in module.modules():  # keep buffers (routers' corrections) in float32 or wider
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(torch.promote_types(buffer.dtype, torch.float32)))
    module = module.to_empty(device=base.device).requires_grad_(False)
    slots = _weight_slots(module)
    for name, tensor in read_tensors(source, list(names), revision).items():
        slots[names[name]].copy_(tensor)
    return MtpDrafter(module, base, f"{os.path.basename(source.rstrip('/')) or source} (MTP)")


def _weight_slots(module: nn.Module) -> dict[str, Tensor]:
    """The module's tensors, or parts of tensors, by the names of the file's weights that are copied into them."""
    state = module.state_dict()
    return {name: part.assemble(state.__getitem__) for name, part in file_weights(state, None).items()}


def _check_config(source: str, config: Mapping[str, Any], base: Model) -> None:
    name = "transformer_layer_config"
    fields = check_object(name, config.get(name, config), f"config.json of {source!r}")
    base_fields = base.text_config.to_dict()
    fields, base_fields = ({**(part.get("rope_parameters") or {}), **part} for part in (fields, base_fields))
    for name in MATCHING_FIELDS:
        value = fields.get(name)
        if None not in (value, base_fields.get(name)) and value != base_fields[name]:
            raise CheckpointError(
                f"{source!r} has {name}={short_repr(value)}, {base.facts.name} has {short_repr(base_fields[name])}: "
                "its MTP heads draft for another model"
            )
