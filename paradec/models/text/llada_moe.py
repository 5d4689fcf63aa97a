"""LLaDA-MoE checkpoints (inclusionAI/LLaDA-MoE-7B-A1B-Base and -Instruct; Zhu et al., arXiv 2509.24389) on Qwen3Moe.

Their `model_type` is "llada", like that of the dense LLaDA; their `architectures` differ. Blocks and names are those of
Qwen3-MoE; the probabilities of the chosen experts are not normalised. Bidirectional; logits row i predicts token i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.checks import short_repr
from paradec.models.checkpoint import CheckpointError, check_supported, read_positive
from paradec.models.family import Family, read_shared_fields
from paradec.models.rotary import rope_parameters
from paradec.models.text.qwen import REQUIRED_SIZES, experts_per_token

SUPPORTED = {
    "hidden_act": ("silu",),
    "qk_layernorm": (True,),
    "attention_bias": (False, None),
    "clip_qkv": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "shared_expert_intermediate_size": (None,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None),
    "norm_topk_prob": (None, False),
    "routed_scaling_factor": (1, 1.0, None),
    "router_num_group": (None,),
    "router_topk_group": (None,),
}
"""Fields that change the maths, and the supported values. (The published code reads and ignores the last five.)"""

REQUIRED = (*REQUIRED_SIZES, "qk_layernorm", "num_experts", "num_experts_per_tok", "expert_intermediate_size")


def is_llada_moe(config: Mapping[str, Any]) -> bool:
    """Whether a config.json of `model_type` "llada" describes a mixture of experts."""
    names = config.get("architectures")
    has_name = isinstance(names, list) and any(isinstance(name, str) and name.startswith("LLaDAMoE") for name in names)
    return has_name or config.get("num_experts") is not None


def qwen3_moe_config(config: Mapping[str, Any]) -> Any:
    """The `Qwen3MoeConfig` of a `config.json`. Raises CheckpointError for a missing, inconsistent or unsupported
    field."""
    from transformers import Qwen3MoeConfig

    fields = read_shared_fields(config, REQUIRED, SUPPORTED)
    layers = fields["num_hidden_layers"]
    check_supported(config, {"head_dim": (None, fields["hidden_size"] // fields["num_attention_heads"])})
    num_experts, top_k = experts_per_token(config)
    dense_layers = _dense_layers(config, layers)
    inner = read_positive(config, "expert_intermediate_size")
    return Qwen3MoeConfig(
        **fields,
        intermediate_size=read_positive(config, "dense_intermediate_size") if dense_layers else inner,
        moe_intermediate_size=inner,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=dense_layers,
        rope_parameters=rope_parameters(config),
        attention_bias=False,
        use_sliding_window=False,
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    frequency = config.get("moe_layer_freq")
    if frequency is None:
        return []
    if not isinstance(frequency, list) or len(frequency) != layers or any(entry not in (0, 1) for entry in frequency):
        raise CheckpointError(
            f"config.json: moe_layer_freq={short_repr(frequency)} must be a list of num_hidden_layers={layers} zeros "
            "and ones: 1 for a layer of experts"
        )
    return [index for index, entry in enumerate(frequency) if not entry]


FAMILY = Family(
    module="Qwen3MoeForCausalLM",
    config=qwen3_moe_config,
    prediction="same",
    default_block_length=32,
    mask_token="<|mask|>",
    experts=True,
)
