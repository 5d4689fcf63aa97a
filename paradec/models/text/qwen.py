"""Configurations of families on transformers' Qwen2, Qwen3 and Qwen3Moe, with the field names of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.checks import check_at_most, short_repr
from paradec.models.checkpoint import CheckpointError, check_supported, checkpoint_errors, read_flag, read_positive
from paradec.models.family import read_shared_fields
from paradec.models.rotary import rope_parameters

SUPPORTED = {"hidden_act": ("silu",), "use_sliding_window": (False, None), "use_mrope": (False, None)}

SUPPORTED_QWEN3 = {"attention_bias": (False, None)}

REQUIRED_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)

REQUIRED = (*REQUIRED_SIZES, "intermediate_size")
"""Fields that config.json must state: the defaults of transformers' classes do not fit the published models."""

REQUIRED_MOE = ("head_dim", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
"""Further fields of mixtures of experts. (The class's default of `norm_topk_prob` differs from published values.)"""


def qwen2_config(config: Mapping[str, Any]) -> Any:
    """The `Qwen2Config` of a config.json with Qwen2's fields. Raises CheckpointError for unsupported fields."""
    from transformers import Qwen2Config

    fields = _fields(config, REQUIRED, SUPPORTED)
    check_supported(config, {"head_dim": (None, fields["hidden_size"] // fields["num_attention_heads"])})
    del fields["head_dim"]
    return Qwen2Config(**fields)


def qwen3_config(config: Mapping[str, Any]) -> Any:
    """The `Qwen3Config` of a config.json. As `qwen2_config`, but the head width is required, and biases are refused."""
    from transformers import Qwen3Config

    return Qwen3Config(**_fields(config, (*REQUIRED, "head_dim"), SUPPORTED | SUPPORTED_QWEN3), attention_bias=False)


def qwen3_moe_config(config: Mapping[str, Any]) -> Any:
    """The `Qwen3MoeConfig` of a config.json, for mixtures of experts; raises as `qwen2_config`."""
    from transformers import Qwen3MoeConfig

    fields = _fields(config, (*REQUIRED, *REQUIRED_MOE), SUPPORTED | SUPPORTED_QWEN3)
    layers = fields["num_hidden_layers"]
    num_experts, top_k = experts_per_token(config)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(type(n) is not int or not 0 <= n < layers for n in dense_layers):
        raise CheckpointError(
            f"config.json: mlp_only_layers={short_repr(dense_layers)} must be a list of layers, 0 to {layers - 1}"
        )
    return Qwen3MoeConfig(
        **fields,
        attention_bias=False,
        moe_intermediate_size=read_positive(config, "moe_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=bool(read_flag(config, "norm_topk_prob", None)),
        decoder_sparse_step=read_positive({"decoder_sparse_step": 1, **config}, "decoder_sparse_step"),
        mlp_only_layers=dense_layers,
    )


def experts_per_token(config: Mapping[str, Any]) -> tuple[int, int]:
    """Read the numbers of experts in a layer and per token. Raises CheckpointError for inconsistent numbers."""
    num_experts, top_k = read_positive(config, "num_experts"), read_positive(config, "num_experts_per_tok")
    with checkpoint_errors("config.json"):
        check_at_most("num_experts_per_tok", top_k, "num_experts", num_experts)
    return num_experts, top_k


def _fields(config: Mapping[str, Any], required: tuple[str, ...], supported: Mapping[str, Any]) -> dict[str, Any]:
    fields, layers = read_shared_fields(config, required, supported), config.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(kind != "full_attention" for kind in layers)):
        raise CheckpointError(
            f"config.json: layer_types={short_repr(layers)} is not supported; supported: 'full_attention'"
        )
    inner, angles = read_positive(config, "intermediate_size"), rope_parameters(config)
    return fields | {"intermediate_size": inner, "rope_parameters": angles, "use_sliding_window": False}
