"""Heads for multi-token prediction (MTP): decoder layers after a model's own that draft what follows the next token.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. Column i of a head reads the token at i and
the model's last hidden state at i - 1, after the final norm, each through a norm of its own; one matrix joins the two,
and a decoder layer of the model's own kind follows. What it makes goes through a norm: the model's output matrix makes
logits of that, and it is the hidden state that comes next. One layer goes on from itself, as EAGLE's does, for any
number of drafts or a tree. Of several, layer k makes draft k: its columns are one further to the right than those of
the layer before, whose states they read.

Three layouts are read: `model.layers.N.` after the model's own layers (DeepSeek-V3, GLM-4 MoE), `mtp.` (Qwen3-Next,
Mellum), and `mtp_layers.N.` (MiMo, speculators), whose public codes put the hidden state first in what the matrix
joins; the others put the token first. Copies of the model's embeddings and output matrix that a file holds are not
read: they are the model's. The layer, its norms and its rotary angles are those of transformers' class of the model.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paradec.caches.store import KeyValueStore
from paradec.core.checks import shown
from paradec.core.query import Query, take_columns
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.causal import count_mtp_layers, find_mtp_weights
from paradec.models.checkpoint import CheckpointError, check_dtypes, check_fit, read_tensors, read_weight_headers
from paradec.models.drafter import FeatureDrafter, check_base
from paradec.models.layers import decoder_layers
from paradec.models.saving import file_weights

SAME = (
    *("hidden_size", "vocab_size", "model_type", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta"),
)
"""Fields of speculators' `transformer_layer_config` in which the layer must be one of the model's."""


class MtpLayer(nn.Module):
    """One head.

    Args:
        config: the model's. kind: its decoder layer. norm: its norm. at: a layer of the model that it is like.
        index: which of the heads it is.
    """

    def __init__(self, config: Any, layer_class: Any, norm_class: Any, like_layer: int, index: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm_class(width, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = layer_class(config, like_layer)
        for part in self.block.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index  # its place in the store

    def forward(self, embedded: Tensor, states: Tensor, hidden_first: bool, **kwargs: Any) -> Tensor:
        """embedded, states [R, Q, D] -> [R, Q, D]. given: as the decoder layer takes them."""
        parts = (self.enorm(embedded), self.hnorm(states))
        output = self.block(self.eh_proj(torch.cat(parts[::-1] if hidden_first else parts, -1)), **kwargs)
        return self.norm(output[0] if isinstance(output, tuple) else output)


class MtpNetwork(nn.Module):
    """All heads.

    Args:
        base: the model. count: how many heads.
        hidden_first: whether their matrices have the hidden state before the token.
    """

    def __init__(self, base: Model, count: int, hidden_first: bool):
        super().__init__()
        layers = decoder_layers(base)
        assert layers is not None  # `check_layers` has seen to it
        self.config, self.hidden_first = copy.deepcopy(base.text_config), hidden_first
        self.config._attn_implementation = "sdpa"
        last_layer: Any = layers[-1]
        kinds = type(last_layer), type(last_layer.input_layernorm), len(layers) - 1
        self.layers = nn.ModuleList(MtpLayer(self.config, *kinds, index) for index in range(count))
        self.config.num_hidden_layers = count


class MtpDrafter(FeatureDrafter):
    """The heads of a model that was trained with them: `create("speculative", drafter=...)` drafts with them.

    Exactness does not depend on them: q is the softmax of all the model's tokens. One layer drafts chains of any length
    (`window`) and trees; several draft one token each.

    Args:
        module: the network.
        base: the model that it drafts for, as loaded or wrapped.

    Raises:
        TypeError: a base of another kind. ValueError: one that it cannot draft for.
    """

    fills: ClassVar[str] = "layers"

    def __init__(self, module: MtpNetwork, base: Model, name: str = "MTP"):
        check_layers(base)
        self.module = module.eval()
        self.base: Any = base
        self.facts = dataclasses.replace(base.facts, name=name)

    @property
    def num_reread(self) -> int:
        """Columns that are read again each time: of the last ones some layers have read drafts in the place of
        tokens."""
        return len(self.module.layers) - 1

    @property
    def slots(self) -> int | None:
        """Slots of a window: the next token and a draft of each layer; None for one layer, which makes any number."""
        return len(self.module.layers) + 1 if self.num_reread else None

    def __call__(self, query: Query, features: Tensor, store: KeyValueStore, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Evaluate tokens of positions 1 and on.

        Args:
            query: one with `visible`; its positions and slots are those of the first layer. The tokens of a later one
                are further to the right by `layer`.
            features: [R, Q, D]: what the layer before made of the query's columns; for the first one the hidden states
                of the positions left of theirs, or, beside a draft, what was made of its parent.
            layer: which one.

        Returns:
            Logits [R, W, V] of the wanted columns, and what was made of them [R, W, D], for several layers of all
            columns [R, Q, D].
        """
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
        """Cosine and sine [R, Q, .] of the model's own angles."""
        config, kinds = self.module.config, {}
        if "full_attention" in (getattr(config, "rope_parameters", None) or {}):  # angles of each kind of layer
            kinds = {"layer_type": "full_attention"}
        return self.base.module.get_decoder().rotary_emb(features, positions, **kinds)


def check_layers(base: Any) -> None:
    """Raise TypeError or ValueError for a model that no such heads can draft for."""
    check_base(base)
    decoder = getattr(base.module, "get_decoder", lambda: None)()
    layers = decoder_layers(base)
    if layers is None or not hasattr(decoder, "rotary_emb") or not hasattr(layers[-1], "input_layernorm"):
        raise ValueError(
            f"base {base.facts.name} has no list of decoder layers of transformers' usual form, of which MTP heads are "
            "made"
        )


# ---- files ----------------------------------------------------------------------------------------------------------


def load_mtp(
    source: str, config: Mapping[str, Any], base: Model, dtype: torch.dtype | None, revision: str | None
) -> MtpDrafter:
    """What `load_drafter` does for heads in a model's own checkpoint, or in speculators' format.

    Raises:
        CheckpointError: as there. TypeError, ValueError: a base that they cannot draft for.
    """
    check_layers(base)
    _check_config(source, config, base)
    headers = read_weight_headers(source, revision)
    weights = find_mtp_weights(headers, config)
    count = 1 + max((int(module_name.split(".")[1]) for module_name in weights.renamed.values()), default=-1)
    num_stated = count_mtp_layers(config)
    if not count:
        raise CheckpointError(
            f"{source!r} has no weights of MTP heads (model.layers.{base.text_config.num_hidden_layers}.eh_proj, "
            "mtp.fc or mtp_layers.0.input_proj)"
        )
    if num_stated not in (0, count):
        raise CheckpointError(
            f"config.json of {source!r} states {num_stated} MTP layers; the weights are those of {count}"
        )
    check_dtypes(source, {name: headers[name].dtype for name in weights.renamed})
    with torch.device("meta"):
        module = MtpNetwork(base, min(count, len(headers)), any(".input_proj." in name for name in weights.renamed))
    check_fit(
        _weight_slots(module),
        {module_name: headers[name] for name, module_name in weights.renamed.items()},
        f"{source} (MTP)",
        "config.json",
    )
    unstored = [name for name, _ in module.named_buffers() if name not in module.state_dict()]
    if unstored:
        raise CheckpointError(f"{source!r}: layers of {base.facts.name} compute {unstored[0]}, which is not supported")
    module = module.to(dtype or base.dtype)
    if dtype == torch.float64:  # kernels of experts have no float64
        module.config._experts_implementation = "eager"
    for part in module.modules():  # corrections of routers stay precise
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(torch.promote_types(buffer.dtype, torch.float32)))
    module = module.to_empty(device=base.device).requires_grad_(False)
    slots = _weight_slots(module)
    for name, tensor in read_tensors(source, list(weights.renamed), revision).items():
        slots[weights.renamed[name]].copy_(tensor)
    return MtpDrafter(module, base, f"{os.path.basename(source.rstrip('/')) or source} (MTP)")


def _weight_slots(module: nn.Module) -> dict[str, Tensor]:
    """Where each of a file's weights belongs: experts one by one."""
    state = module.state_dict()
    return {name: part.assemble(state.__getitem__) for name, part in file_weights(state, None).items()}


def _check_config(source: str, config: Mapping[str, Any], base: Model) -> None:
    """Raise CheckpointError for heads of another model."""
    sizes = config.get("transformer_layer_config", config)
    if not isinstance(sizes, dict):
        raise CheckpointError(f"config.json of {source!r}: transformer_layer_config={shown(sizes)} must be an object")
    base_sizes = base.text_config.to_dict()
    sizes, base_sizes = ({**(fields.get("rope_parameters") or {}), **fields} for fields in (sizes, base_sizes))
    for name in SAME:
        size = sizes.get(name)
        if None not in (size, base_sizes.get(name)) and size != base_sizes[name]:
            raise CheckpointError(
                f"{source!r} has {name}={shown(size)}, {base.facts.name} {shown(base_sizes[name])}: its MTP heads "
                "draft for another model"
            )
