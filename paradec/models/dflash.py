"""DFlash drafters (Chen et al., arXiv 2602.06036; z-lab/dflash): layers that fill a whole block of masks in one
forward.

A draft block is the last accepted token and `block_size - 1` masks, embedded by the model. Each layer computes keys and
values from the block and, with the same matrices, from the model's hidden states after layers `target_layer_ids`. The
model's output matrix converts the state at a mask to logits for the position of this mask.

The network is transformers' `MuseGlimmerAssistantModel`; `_masks` makes its masks. Two formats are read: transformers'
and z-lab's (`dflash_config` in a Qwen3's config.json). In z-lab's format sliding layers are causal unless `is_causal`
is false, a key at the distance of the window is hidden, and embeddings are plain rows of the model's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn

from paradec.caches.store import KeyValueStore
from paradec.core.checks import LARGEST_INT, check_int, check_number, short_repr
from paradec.core.query import Query
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.checkpoint import (
    CheckpointError,
    StoredTensor,
    check_object,
    check_stored_dtypes,
    check_supported,
    checkpoint_errors,
    read_flag,
    read_module,
    read_positive,
    read_weight_headers,
)
from paradec.models.drafter import (
    NO_BIAS,
    FeatureDrafter,
    build_config,
    check_base_sizes,
    check_layers,
    make_drafter,
    read_angles,
    read_layer_fields,
)

TRANSFORMERS_TYPE = "muse_glimmer_assistant"
"""The `model_type` of transformers' format."""
KEY_MAPPING = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
"""z-lab's names of weights -> transformers'."""
FIELDS = (
    *("block_size", "mask_token_id", "target_layer_ids", "is_causal"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)
"""Fields that z-lab's `dflash_config` may have."""
NUMBERS = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
MAX_LAYERS = 1000
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class BlockSettings:
    """Settings of a drafter besides its weights.

    block_size: number of tokens in a block. mask_token_id: the id that stands for a token to draft.
    target_layer_ids: layers of the model, from 0, whose outputs are read.
    window: of sliding layers, in positions; 0 without such layers.
    causal: whether each position of the block sees only positions up to its own in sliding layers.
    raw_embeddings: whether embeddings are rows of the model's table, without other steps of its embedding module.
    scale: factor of the embeddings. multiplier, soft_cap: of the logits; soft_cap 0 is none.
    first_draft: index in the block of the first column that drafts; 0 if the last accepted token's column does.
    anchored: whether all columns use the last accepted token's window, which then includes the distance `window`."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    window: int = 0
    causal: bool = False
    raw_embeddings: bool = False
    scale: float = 1.0
    multiplier: float = 1.0
    soft_cap: float = 0.0
    first_draft: int = 1
    anchored: bool = False


class DFlashDrafter(FeatureDrafter):
    """A DFlash network over the model that it was trained for, as `drafter` of the sampler "speculative". It makes
    `block_size - 1` drafts in one forward. A bad network lowers acceptance; outputs stay exact.

    module: transformers' network. base: the model, loaded or wrapped."""

    fills: ClassVar[str] = "block"

    def __init__(self, module: Any, base: Model, settings: BlockSettings, name: str = "DFlash"):
        super().__init__(module, base, name)
        check_base_sizes(name, base, hidden_size=module.config.hidden_size)
        check_layers("target_layer_ids", settings.target_layer_ids, base, settings.anchored)
        check_int("mask_token_id", settings.mask_token_id, low=0, high=base.facts.vocab_size - 1)
        self.settings = settings
        self.block_size, self.mask_token_id = settings.block_size, settings.mask_token_id
        self.keep_layers = settings.target_layer_ids

    @property
    def slots(self) -> int:
        """Slots of a window: the next token and all drafts."""
        return self.settings.block_size + 1 - self.settings.first_draft

    def __call__(self, query: Query, features: Tensor, store: KeyValueStore) -> Tensor:
        """Logits [R, n, V] of the block's n columns that draft, for R requests.

        query: C columns of accepted tokens, whose keys and values are stored, then the columns of the block.
        features: [R, C, layers * D]: the model's hidden states (of width D) at the accepted tokens."""
        with torch.no_grad():
            return self.logits(self.states(query, features, store))

    def states(self, query: Query, features: Tensor, store: KeyValueStore) -> Tensor:
        """Output states [R, n, D] of the columns that draft; arguments as for a call."""
        with torch.no_grad():
            num_context = features.shape[1]
            cache = store.bind(query)
            output = self.module(
                noise_embeds=self._embed(query.tokens[:, num_context:]).to(self.device, self.dtype),
                context_hidden_states=features.to(self.device, self.dtype),
                attention_mask=self._masks(query, store, num_context),
                position_ids=query.positions,
                **cache_keyword(self.module, cache),
            )
            return output.last_hidden_state[:, self.settings.first_draft :]

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, n, V] of states [R, n, D]."""
        logits = self.base.head(states.to(self.base.device, self.base.dtype)) * self.settings.multiplier
        soft_cap = self.settings.soft_cap
        return torch.tanh(logits / soft_cap) * soft_cap if soft_cap else logits

    def _embed(self, ids: Tensor) -> Tensor:
        """Embeddings [R, Q, D] of ids [R, Q]."""
        get_embeddings = getattr(self.base.module, "get_input_embeddings", None)
        if self.settings.raw_embeddings or get_embeddings is None:
            return nn.functional.embedding(ids, self.base.token_embeddings()) * self.settings.scale
        embedding = get_embeddings()
        if hasattr(embedding, "embed_norm"):  # drafters are trained without that norm
            return nn.Embedding.forward(embedding, ids) * self.settings.scale
        embedded: Tensor = embedding(ids)
        return embedded * self.settings.scale

    def _masks(self, query: Query, store: KeyValueStore, num_context: int) -> dict[str, Tensor]:
        """Masks [R, 1, block, K] bool by layer type: which of K keys each column of the block sees."""
        mask, keys = store.visible(query)
        assert mask is not None  # the query sets `visible`
        full = mask[:, :, num_context:]
        settings = self.settings
        if not settings.window:
            return {"full_attention": full}
        distance = query.positions[:, num_context:, None] - keys[:, None, :]
        in_window = distance < settings.window
        in_window &= distance >= 0 if settings.causal else -distance < settings.window
        if settings.anchored:
            in_window = query.positions[:, num_context, None, None] - keys[:, None, :] <= settings.window
            in_window = in_window & (distance >= 0) if settings.causal else in_window
        return {"full_attention": full, "sliding_attention": full & in_window[:, None]}


class WalkDrafter(DFlashDrafter):
    """A DFlash drafter whose drafts depend on earlier drafts: `walk` converts states to logits token by token."""

    fills: ClassVar[str] = "walk"

    def __call__(self, query: Query, features: Tensor, store: KeyValueStore) -> Tensor:
        """Return `states`, the input of `walk`."""
        return self.states(query, features, store)


# ---- files ----------------------------------------------------------------------------------------------------------


def load_dflash(
    source: str, config: Mapping[str, Any], base: Model, dtype: torch.dtype | None, revision: str | None
) -> DFlashDrafter:
    """Load a DFlash drafter, as `load_drafter` does."""
    fields, settings = read_settings(
        source, flatten_config(source, config), base, config.get("dflash_config") is not None
    )
    module = read_network(
        source, network_classes(source)[1], fields, settings, base, dtype, revision, "dflash_config" in config
    )
    return make_drafter(DFlashDrafter, source, module, base, settings)


def read_network(
    source: str,
    cls: Any,
    fields: Mapping[str, Any],
    settings: BlockSettings,
    base: Model,
    dtype: torch.dtype | None,
    revision: str | None,
    is_zlab: bool = True,
    unused_suffixes: tuple[str, ...] = (),
    **extra: Any,
) -> Any:
    """Read the network onto the base's device. Raises CheckpointError for weights that do not fit.

    cls: the network's class. fields: of transformers' config. extra: further config fields that `cls` reads.
    is_zlab: whether weights have z-lab's names. unused_suffixes: endings of names of tensors that are not read."""
    _check_sizes(source, fields, read_weight_headers(source, revision))
    check_stored_dtypes(source, {}, revision, unused_suffixes)
    ids = {"block_size": settings.block_size, "mask_token_id": settings.mask_token_id}
    config = build_config(source, network_classes(source)[0], **fields, **ids)
    for name, value in (extra | {"target_layer_ids": list(settings.target_layer_ids)}).items():
        setattr(config, name, value)
    config._attn_implementation = "sdpa"
    options: dict[str, Any] = {"key_mapping": dict(KEY_MAPPING)} if is_zlab else {}
    options |= {"computed": unused_suffixes, "dtype": dtype or base.dtype}
    return read_module(cls, source, revision, config=config, **options).to(base.device).requires_grad_(False)


def network_classes(source: str) -> tuple[Any, Any]:
    """transformers' classes of the config and of the network. Raises CheckpointError before transformers 5.23."""
    try:
        from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError:
        raise CheckpointError(
            f"{source!r} is a DFlash drafter, which needs transformers 5.23 or newer; this is "
            f"{transformers.__version__}"
        ) from None
    return MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel


def read_settings(
    source: str, config: Mapping[str, Any], base: Model, is_zlab: bool = True
) -> tuple[dict[str, Any], BlockSettings]:
    """Return fields for transformers' config, and block settings. is_zlab: False for transformers' format."""
    where = f"config.json of {source!r}"
    names = ("hidden_size", "vocab_size", "num_target_layers")
    check_base_sizes(source, base, **{name: config.get(name) for name in names})
    num_layers: Any = config.get("num_hidden_layers")
    with checkpoint_errors(where):
        check_int("num_hidden_layers", num_layers, low=1, high=MAX_LAYERS)
    layer_types = config.get("layer_types", ["full_attention" if is_zlab else "sliding_attention"] * num_layers)
    is_known = isinstance(layer_types, list) and all(kind in LAYER_TYPES for kind in layer_types)
    if not is_known or len(layer_types) != num_layers:
        raise CheckpointError(
            f"{where}: layer_types={short_repr(layer_types)} must be a list of num_hidden_layers={num_layers} "
            f"entries, each one of {', '.join(LAYER_TYPES)}"
        )
    fields = read_layer_fields(source, config, max_position_embeddings=131072)
    angles = read_angles(source, config, 10000.0 if is_zlab else 500000.0)
    fields |= {"num_hidden_layers": num_layers, "layer_types": layer_types, "rope_parameters": angles}
    settings = _read_block_settings(source, config, base, is_zlab, "sliding_attention" in layer_types)
    return fields | {"target_layer_ids": config["target_layer_ids"]}, settings


def flatten_config(source: str, config: Mapping[str, Any], known_fields: Sequence[str] = FIELDS) -> dict[str, Any]:
    """Merge config.json and its `dflash_config` (z-lab's) into one object, without nulls. Raises CheckpointError for an
    unsupported variant. known_fields: supported fields of `dflash_config`."""
    where, dflash_config = f"config.json of {source!r}", config.get("dflash_config")
    dflash_config = {} if dflash_config is None else check_object("dflash_config", dflash_config, where)
    dflash_fields = {name: value for name, value in dflash_config.items() if value is not None}
    if unknown := sorted(
        name for name, value in dflash_fields.items() if name not in known_fields and value not in (None, False)
    ):
        raise CheckpointError(f"{where}: dflash_config has {', '.join(unknown)}, of an unsupported variant of DFlash")
    check_supported(config, NO_BIAS, where)
    return {name: value for name, value in {**config, **dflash_fields}.items() if value is not None}


def _read_block_settings(
    source: str, config: Mapping[str, Any], base: Model, is_zlab: bool, has_window: bool
) -> BlockSettings:
    where, layers = f"config.json of {source!r}", config.get("target_layer_ids")
    mask_token_id: Any = config.get("mask_token_id")
    if not isinstance(layers, list) or not layers or not all(type(index) is int for index in layers):
        raise CheckpointError(f"{where}: target_layer_ids={short_repr(layers)} must be a list of layers")
    config = {"sliding_window": 2048, "block_size": 16, **config}
    # transformers' window is one position wider than z-lab's
    window = read_positive(config, "sliding_window") + (not is_zlab) if has_window else 0
    max_block = base.facts.max_length or LARGEST_INT
    scale, multiplier, soft_cap = (config.get(name, default) for name, default in NUMBERS.items())
    with checkpoint_errors(where):
        check_int("mask_token_id", mask_token_id, low=0)
        check_int("block_size", config["block_size"], low=2, high=max_block)
        check_number("input_embedding_scale", scale, low=0, open_low=True)
        check_number("output_multiplier", multiplier, low=0, open_low=True)
        check_number("final_logit_softcapping", soft_cap, low=0)
    return BlockSettings(
        block_size=config["block_size"],
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(layers),
        window=window,
        causal=is_zlab and read_flag(config, "is_causal", True) is not False,
        raw_embeddings=is_zlab,
        scale=float(scale),
        multiplier=float(multiplier),
        soft_cap=float(soft_cap),
    )


def _check_sizes(source: str, fields: Mapping[str, Any], headers: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError for sizes that differ from the weights', before a module is built."""
    heads, kv_heads, inner, width = (
        fields[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")
    )
    for setting, rows, name in (
        (f"num_attention_heads={heads} of head_dim={width}", heads * width, "self_attn.q_proj"),
        (f"num_key_value_heads={kv_heads} of head_dim={width}", kv_heads * width, "self_attn.k_proj"),
        (f"intermediate_size={inner}", inner, "mlp.gate_proj"),
    ):
        weight = f"layers.{fields['num_hidden_layers'] - 1}.{name}.weight"
        if weight not in headers or headers[weight].shape[:1] != (rows,):
            actual = f"has {headers[weight].shape[0]}" if weight in headers else "is missing"
            raise CheckpointError(
                f"the weights of {source!r} do not fit config.json: num_hidden_layers={fields['num_hidden_layers']} "
                f"and {setting} need {rows} rows of {weight}, which {actual}"
            )
