"""Base of drafters that read a model's hidden states, and shared parts of reading their files."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paradec.caches.store import KeyValueStore, store_bytes
from paradec.core.checks import check_bool, check_choice, check_int, check_model, check_number, short_repr
from paradec.core.facts import ModelFacts
from paradec.core.memory import check_memory
from paradec.models.base import Adapter, Model
from paradec.models.checkpoint import (
    CheckpointError,
    check_object,
    check_supported,
    checkpoint_errors,
    read_flag,
    read_positive,
)
from paradec.models.layers import require_decoder_layers

ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
)
NO_BIAS: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False, None)}
TABLES = ("d2t", "t2d")
"""`d2t`: offsets from the drafter's ids to the model's; `t2d`: for each id of the model, whether the drafter has it."""


class FeatureDrafter(Adapter):
    """Base of networks that draft from hidden states of a model, `base`, which they were trained for. Raises TypeError
    or ValueError for a base that such a network cannot draft for."""

    makes: ClassVar[str] = "drafts"
    fills: ClassVar[str] = ""
    """How drafts fill a window: "block" (one call), "walk" (one by one), "layers" (by head); "" for chains, trees."""
    reads_features: ClassVar[bool] = True
    """Whether drafts start from the model's hidden states (`CausalQuery.keep_hidden`)."""
    keep_layers: tuple[int, ...] | None = None
    """Layers of the model whose outputs are read; None reads its last hidden states."""
    tokens: Tensor | None = None
    """[Vd] int64: the model's id of each of the drafter's Vd tokens; None if these are all of the model's tokens."""
    pads = supports_store = supports_visibility = True
    module: Any
    base: Any
    facts: ModelFacts

    def __init__(self, module: Any, base: Model, name: str):
        check_base(base)
        super().__init__(module)
        self.base = base
        self.facts = dataclasses.replace(base.facts, name=name)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name = type(self).__name__
        return f"{name}({self.facts.name!r}: drafts for {self.base.facts.name!r}, {dtype} on {self.device})"

    def store_bytes(self, rows: int, length: int) -> int:
        """Bytes of a store with `rows` rows and `length` positions."""
        return store_bytes(self.module.config, rows, length, self.dtype)

    def make_store(self, rows: int, length: int) -> KeyValueStore:
        """An empty store of keys and values. Raises ValueError if it exceeds the device's memory."""
        check_memory(
            self.store_bytes(rows, length),
            self.device,
            None,
            f"the drafter's key/value store of {rows} x {length} positions",
        )
        return KeyValueStore(rows, length, self.device)

    def expand_logits(self, logits: Tensor) -> Tensor:
        """Logits [..., Vd] of the drafter's tokens -> [..., V], with minus infinity for other tokens."""
        if self.tokens is None:
            return logits
        expanded = logits.new_full((*logits.shape[:-1], self.facts.vocab_size), -torch.inf)
        return expanded.index_copy_(-1, self.tokens, logits)

    def fuse(self, features: Tensor) -> Tensor:
        """Convert features [R, F, layers * D] at F positions to inputs [R, F, D] of the next positions. This base class
        returns them unchanged."""
        return features

    def bind(self, model: Model) -> Self:
        """A copy of the drafter over `model`, a request's copy of the base. Raises ValueError for another model."""
        if getattr(model, "module", None) is not self.base.module:
            raise ValueError(
                f"drafter {self.facts.name} reads features of {self.base.facts.name}, and cannot draft for "
                f"{model.facts.name}: load the drafter with that model as base="
            )
        drafter = copy.copy(self)
        drafter.base = model
        return drafter


def check_base(base: Any) -> None:
    """Raise TypeError or ValueError for a model that a `FeatureDrafter` cannot draft for."""
    facts = getattr(base, "facts", None)
    if facts is None:
        raise ValueError(f"base={short_repr(base)} must be a model from paradec.load or paradec.wrap")
    check_model("load_drafter(base=...)", base, ("text", "image"))
    if (facts.topology, facts.prediction) != ("causal", "shifted"):
        raise ValueError(f"base {facts.name} must be causal and predict the next token; it is {facts.topology!r}")
    if getattr(base, "hidden_size", None) is None:
        raise ValueError(f"base {facts.name} gives no hidden states, which a drafter reads")
    if not getattr(base, "has_head", True):
        raise ValueError(f"base {facts.name} has no output matrix, which a drafter's logits need")
    if not (base.supports_store and base.supports_visibility):
        raise ValueError(f"base {facts.name} does not run over a key/value store, which a drafter needs")


def check_base_sizes(name: str, base: Model, **sizes: Any) -> None:
    """Raise CheckpointError if a size of the drafter `name` is not the model's; None is not compared."""
    base_sizes = {
        "hidden_size": base.hidden_size,
        "target_hidden_size": base.hidden_size,
        "vocab_size": base.facts.vocab_size,
        "num_target_layers": base.text_config.num_hidden_layers,
    }
    for field, value in sizes.items():
        if value not in (None, base_sizes[field]):
            raise CheckpointError(
                f"{name!r} has {field}={short_repr(value)}, {base.facts.name} has {base_sizes[field]}: it drafts for "
                "another model"
            )


def check_layers(name: str, indices: Iterable[int], base: Model, has_final: bool) -> None:
    """Raise ValueError unless indices are from 0 to n - 1, for a base of n layers. has_final: whether n is allowed."""
    count = len(require_decoder_layers(base))
    for index in indices:
        check_int(name, index, low=0, high=count if has_final else count - 1)


def read_layer_fields(source: str, config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Sizes of a drafter's decoder layers, by the names of transformers' configurations. Raises CheckpointError for a
    wrong field.

    defaults: values of fields that config.json may leave out."""
    where = f"config.json of {source!r}"
    hidden, heads = (read_positive(config, name) for name in ("hidden_size", "num_attention_heads"))
    defaults |= {"num_key_value_heads": heads, "head_dim": hidden // heads, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    fields = defaults | {name: value for name, value in config.items() if value is not None}
    kv_heads, width = (read_positive(fields, name) for name in ("num_key_value_heads", "head_dim"))
    if heads % kv_heads or width % 2:
        raise CheckpointError(
            f"{where}: num_attention_heads={heads}, num_key_value_heads={kv_heads} and head_dim={width} do not fit "
            "together"
        )
    with checkpoint_errors(where):
        check_choice("hidden_act", fields["hidden_act"], ACT2FN)
    return {
        "hidden_size": hidden,
        "intermediate_size": read_positive(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "hidden_act": fields["hidden_act"],
        "rms_norm_eps": float(read_positive(fields, "rms_norm_eps")),
        "max_position_embeddings": read_positive(fields, "max_position_embeddings"),
    }


def make_drafter(cls: Any, source: str, *args: Any) -> Any:
    """Make a drafter of class `cls`, named after its folder. Raises CheckpointError if `cls` raises ValueError."""
    with checkpoint_errors(repr(source)):
        drafter = cls(*args, os.path.basename(source.rstrip("/")) or source)
    return drafter


def read_angles(source: str, config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Read transformers' `rope_parameters` from a drafter's config.json. Raises CheckpointError for a field that is
    unknown or out of its range, or two different bases of the angles. theta: the base if config.json states none."""
    base = config.get("rope_theta")
    name = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    fields = {} if config.get(name) is None else config[name]
    where = f"config.json of {source!r}"
    check_object(name, fields, where)
    with checkpoint_errors(where):
        check_number("rope_theta", base, low=0, open_low=True, none=True)
        angles = {"rope_theta": float(theta if base is None else base), "rope_type": "default"}
        for field, value in fields.items():
            if value is None:
                continue
            if field in ("rope_type", "type"):
                check_choice(f"{name}[{field!r}]", value, ("default", *ROPE_INIT_FUNCTIONS))
                angles["rope_type"] = value
                continue
            if field in ROPE_NUMBERS:
                check_number(f"{name}[{field!r}]", value, low=0, open_low=field == "rope_theta")
            elif field in ("short_factor", "long_factor") and isinstance(value, list):
                for number in value:
                    check_number(f"{name}[{field!r}]", number, low=0, open_low=True)
            elif field == "truncate":
                check_bool(f"{name}[{field!r}]", value)
            elif field != "partial_rotary_factor" or value != 1:
                raise ValueError(
                    f"{name}={short_repr(fields)}: {short_repr(field)}={short_repr(value)} is not supported"
                )
            angles[field] = value
        if None not in (base, fields.get("rope_theta")) and base != fields["rope_theta"]:
            raise ValueError(
                f"two bases of the rotary angles: rope_theta={short_repr(base)}, and {name}={short_repr(fields)}"
            )
    return angles


def build_config(source: str, cls: Any, **fields: Any) -> Any:
    """Build a configuration of transformers' class `cls`. Raises CheckpointError for wrong fields or angles."""
    angles = fields["rope_parameters"]
    try:
        config = cls(**fields)
        if LlamaRotaryEmbedding(config).inv_freq.isfinite().all():
            return config
        problem = "they are not finite"
    except Exception as error:  # strict dataclasses, look-ups and arithmetic each raise their own kinds
        problem = " ".join(str(error).split())
    raise CheckpointError(
        f"config.json of {source!r}: the rotary angles of rope_parameters or rope_scaling={short_repr(angles)} cannot "
        f"be computed: {problem}"
    )


def read_input_layers(source: str, name: str, inputs: Any, base: Model) -> tuple[int, ...]:
    """Convert layer numbers in config.json to `CausalQuery.keep_layers`. In config.json, l means the input of
    layer l, which is the output of layer l - 1; the largest l means the last layer's output before the final norm.
    Raises CheckpointError for anything but a list of layers."""
    count = base.text_config.num_hidden_layers
    if not isinstance(inputs, list) or not inputs or not all(type(n) is int and 0 < n <= count for n in inputs):
        raise CheckpointError(
            f"config.json of {source!r}: {name}={short_repr(inputs)} must be a list of integers from 1 to {count}, the "
            f"layers of {base.facts.name}; l means the input of layer l"
        )
    return tuple(count if layer == count else layer - 1 for layer in inputs)


def read_token_map(source: str, tables: Mapping[str, Tensor], rows: int | None, base: Model) -> Tensor | None:
    """[Vd] int64: the model's id of each of the drafter's Vd tokens; None if these are all of the model's tokens.
    Raises CheckpointError for wrong tables.

    rows: number of rows of the drafter's output matrix; None if it has no such matrix."""
    vocab = base.facts.vocab_size
    count = vocab if rows is None else rows
    tokens = torch.arange(count)
    if "d2t" in tables:
        offsets = tables["d2t"]
        if offsets.shape != (count,) or offsets.dtype.is_floating_point:
            raise CheckpointError(
                f"{source!r}: d2t must be {count} integers, as many as lm_head.weight has rows; it has shape "
                f"{tuple(offsets.shape)} and dtype {offsets.dtype}"
            )
        tokens = tokens + offsets.long()
        if bool((tokens < 0).any() | (tokens >= vocab).any()) or len(tokens.unique()) < count:
            raise CheckpointError(f"{source!r}: d2t must lead to {count} different ids from 0 to {vocab - 1}")
    elif count != vocab:
        raise CheckpointError(f"{source!r} has {count} rows of lm_head.weight for {vocab} tokens, and no d2t")
    if "t2d" in tables:
        _check_t2d(source, tables["t2d"], tokens, vocab)
    return tokens if "d2t" in tables else None


def _check_t2d(source: str, t2d: Tensor, tokens: Tensor, vocab: int) -> None:
    if t2d.shape != (vocab,) or t2d.dtype.is_floating_point:
        raise CheckpointError(
            f"{source!r}: t2d must have a bool or integer for each of {vocab} ids; it has shape {tuple(t2d.shape)} and "
            f"dtype {t2d.dtype}"
        )
    drafted = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, tokens, True)
    conflicts = (drafted != t2d.bool()).nonzero()
    if len(conflicts):
        token = int(conflicts[0])
        leads = "leads to" if drafted[token] else "does not lead to"
        raise CheckpointError(
            f"{source!r}: d2t and t2d contradict each other for {len(conflicts)} ids: d2t {leads} id {token}, and "
            f"t2d[{token}] is {bool(t2d[token])}"
        )


def flatten_speculators_config(source: str, config: Mapping[str, Any], base: Model) -> dict[str, Any]:
    """config.json of speculators' block drafters (DFlash 2, DSpark) as one flat object. Layers are numbered as in
    `CausalQuery.keep_layers`; `is_causal` applies to sliding layers. Raises CheckpointError for a wrong field."""
    where = f"config.json of {source!r}"
    layer_config = check_object("transformer_layer_config", config.get("transformer_layer_config"), where)
    check_supported(layer_config, NO_BIAS, where)
    check_base_sizes(source, base, target_hidden_size=config.get("target_hidden_size"))
    name = "aux_hidden_state_layer_ids"
    layers = read_input_layers(source, name, config.get(name), base)
    fields = {key: value for key, value in config.items() if value is not None and key != "transformer_layer_config"}
    is_bidirectional = read_flag(fields, "sliding_window_non_causal", fields["speculators_model_type"] == "dflash2")
    layer_fields = {key: value for key, value in layer_config.items() if value is not None}
    return {**layer_fields, **fields, "target_layer_ids": list(layers), "is_causal": not is_bidirectional}
