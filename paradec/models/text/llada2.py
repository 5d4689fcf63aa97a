"""LLaDA2 checkpoints (inclusionAI/LLaDA2.0, 2.1 and 2.2, -mini, -flash, and others) on transformers' Glm4Moe.

Bie et al., "LLaDA2.0", arXiv 2512.15745; "LLaDA2.1", arXiv 2602.08676. The network is Glm4Moe under other names; its
one matrix for queries, keys and values is split on reading (`paradec.models.text.llada2_modules`).
Block-causal over blocks of 32 counted from position 0; logits row i predicts token i. Published decoding: samplers
"threshold" (preset "llada2.0"), "editing" (preset "llada2.1") and "levenshtein" (LLaDA2.2, which also chooses experts
for whole blocks)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paradec.core.checks import check_at_most, check_int, short_repr
from paradec.models.checkpoint import CheckpointError, checkpoint_errors, is_int8, read_positive
from paradec.models.decoder import Decoder
from paradec.models.family import Family, read_shared_fields
from paradec.models.rotary import rope_parameters
from paradec.models.text.qwen import REQUIRED_SIZES, experts_per_token

KEY_MAPPING = {
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.query_layernorm\.": ".self_attn.q_norm.",
    r"\.attention\.key_layernorm\.": ".self_attn.k_norm.",
    r"\.attention\.query_key_value\.": ".self_attn.query_key_value.",
    r"\.mlp\.gate\.expert_bias$": ".mlp.gate.e_score_correction_bias",
}
"""Checkpoint names -> Glm4Moe names, except split matrices (`FUSED`) and experts, which transformers stacks."""
FUSED = {
    "self_attn.query_key_value.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    )
}
"""A matrix of the file -> the module's matrices whose rows it contains, in order."""
PUBLISHED = re.compile(r"LLaDA2\.[01]-(?:mini|flash)(?:-.+)?")
"""Names of published models. All were trained with blocks of 32, which their config.json does not state."""
BLOCK_NAME = "block_length"

SUPPORTED = {
    "hidden_act": ("silu",),
    "use_qk_norm": (True, None),
    "use_qkv_bias": (False, None),
    "use_bias": (False, None),
    "use_rmsnorm": (True, None),
    "use_sliding_window": (False, None),
    "using_split_qkv_in_self_attention": (False, None),
    "norm_head": (False, None),
    "norm_softmax": (False, None),
    "norm_topk_prob": (True, None),
    "score_function": ("sigmoid", None),
    "moe_router_enable_expert_bias": (True, None),
    "router_dtype": ("fp32", None),
}
CAPACITY = "expert_capacity"
"""LLaDA2.2's field for the number of experts per block; `BLOCK_SIZE` is its field for the block length."""
BLOCK_SIZE = "block_size"

REQUIRED = (
    *REQUIRED_SIZES,
    "intermediate_size",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "partial_rotary_factor",
)


def glm4_moe_config(config: Mapping[str, Any]) -> Any:
    """The `Glm4MoeConfig` of a `config.json`. Raises CheckpointError for a missing, inconsistent or unsupported
    field."""
    from transformers import Glm4MoeConfig

    if not config.get("num_key_value_heads"):
        config = {**config, "num_key_value_heads": config.get("num_attention_heads")}
    fields = read_shared_fields(config, REQUIRED, SUPPORTED, is_fully_rotated=False)
    if config.get("quantization_config") is not None and not is_int8(config):
        raise CheckpointError(
            f"config.json: quantization_config={short_repr(config['quantization_config'])} is not supported: the "
            "published query_key_value matrices are split on reading; quantised matrices cannot be split"
        )
    dense, layers = config["first_k_dense_replace"], fields["num_hidden_layers"]
    with checkpoint_errors("config.json"):
        check_int("first_k_dense_replace", dense, low=0, high=layers)
    return Glm4MoeConfig(
        **fields,
        intermediate_size=read_positive(config, "intermediate_size"),
        moe_intermediate_size=read_positive(config, "moe_intermediate_size"),
        first_k_dense_replace=dense,
        n_shared_experts=read_positive(config, "num_shared_experts"),
        routed_scaling_factor=float(read_positive(config, "routed_scaling_factor")),
        **_routing(config),
        rope_parameters=rope_parameters(config, _rotated_share(config, fields["head_dim"])),
        use_qk_norm=True,
        attention_bias=False,
    )


def _rotated_share(config: Mapping[str, Any], width: int) -> float:
    factor = read_positive(config, "partial_rotary_factor")
    rotated = int(width * factor)
    if factor > 1 or rotated < 2 or rotated % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor={factor} of heads of {width} rotates {rotated} entries; rotary angles "
            f"need an even number of at most {width}"
        )
    if config.get("rotary_dim") not in (None, rotated):
        raise CheckpointError(
            f"config.json: rotary_dim={short_repr(config['rotary_dim'])} contradicts partial_rotary_factor={factor}, "
            f"which rotates {rotated} of {width}"
        )
    return float(factor)


def _routing(config: Mapping[str, Any]) -> dict[str, Any]:
    num_experts, top_k = experts_per_token(config)
    # norm_topk_prob: as in the published code
    fields = {"n_routed_experts": num_experts, "num_experts_per_tok": top_k, "norm_topk_prob": top_k > 1}
    if config.get(CAPACITY) is not None:
        capacity, block = read_positive(config, CAPACITY), read_positive(config, BLOCK_SIZE)
        with checkpoint_errors("config.json"):
            check_at_most("num_experts_per_tok", top_k, CAPACITY, capacity)
            check_at_most(CAPACITY, capacity, "num_experts", num_experts)
        return fields | {"n_group": 1, "topk_group": 1, CAPACITY: capacity, BLOCK_SIZE: block}
    num_groups, topk_group = (read_positive(config, name) for name in ("n_group", "topk_group"))
    if num_experts % num_groups or num_experts < 2 * num_groups:
        raise CheckpointError(
            f"config.json: num_experts={num_experts} must be a multiple of n_group={num_groups}, at least twice that"
        )
    with checkpoint_errors("config.json"):
        check_at_most("topk_group", topk_group, "n_group", num_groups)
        check_at_most("num_experts_per_tok", top_k, "experts of topk_group", topk_group * (num_experts // num_groups))
    return fields | {"n_group": num_groups, "topk_group": topk_group}


def reader() -> type:
    from paradec.models.text.llada2_modules import register_reader

    return register_reader(FUSED)


def decoder(config: Any) -> type:
    """The adapter class for a configuration: `BlockRoutedDecoder` if it states `CAPACITY`, else `Decoder`."""
    if getattr(config, CAPACITY, None) is None:
        return Decoder
    from paradec.models.text.llada2_modules import BlockRoutedDecoder

    return BlockRoutedDecoder


FAMILY = Family(
    module="Glm4MoeForCausalLM",
    config=glm4_moe_config,
    prediction="same",
    key_mapping=KEY_MAPPING,
    block_name=BLOCK_NAME,
    second_block_name=BLOCK_SIZE,
    published_names=PUBLISHED,
    published_block=32,
    mask_token="<|mask|>",
    experts=True,
    fused=FUSED,
    reader=reader,
    decoder=decoder,
    padding_ends=True,
)
