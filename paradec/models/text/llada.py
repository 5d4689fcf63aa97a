"""LLaDA checkpoints (GSAI-ML/LLaDA-8B, LLaDA-1.5, iLLaDA-8B, ...; Nie et al., arXiv 2502.09992) on transformers'
Llama.

A LLaDA block is a Llama block with other names: `ff_proj` gates (SiLU), `up_proj` multiplies, the block's `ff_out`
projects down; `transformer.ff_out` is the output matrix. Bidirectional; logits row i predicts token i."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.checks import check_at_most, check_divides, is_finite
from paradec.models.checkpoint import (
    NEUTRAL,
    CheckpointError,
    check_supported,
    checkpoint_errors,
    read_flag,
    read_positive,
    require_fields,
)
from paradec.models.family import Family
from paradec.models.rotary import rope_parameters

KEY_MAPPING = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.": r"model.layers.\1.input_layernorm.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"^model\.transformer\.blocks\.(\d+)\.q_proj\.": r"model.layers.\1.self_attn.q_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.k_proj\.": r"model.layers.\1.self_attn.k_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.v_proj\.": r"model.layers.\1.self_attn.v_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.up_proj\.": r"model.layers.\1.mlp.up_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_out\.": r"model.layers.\1.mlp.down_proj.",
}
"""Checkpoint names -> Llama names (`from_pretrained(key_mapping=...)` accepts one group per pattern)."""

SUPPORTED = {
    "block_type": ("llama",),
    "block_group_size": (1, None),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False, None),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "rope": (True,),
    "alibi": (False, None),
    "input_emb_norm": (False, None),
    "scale_logits": (False, None),
    "activation_type": ("silu",),
    "sliding_window": (None,),
    "clip_qkv": (None,),
}
"""Fields that change the maths -> the values that Llama supports; the first is that of LLaDA-8B."""

CLASS_DEFAULTS = {
    "block_type": "sequential",
    "activation_type": "swiglu",
    "include_bias": True,
    "layer_norm_type": "default",
    "rope": False,
}
"""Defaults of the published configuration class that `SUPPORTED` does not allow."""

REQUIRED = ("d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_length")


def llama_config(config: Mapping[str, Any]) -> Any:
    """The `LlamaConfig` of a `config.json`. Raises CheckpointError for missing, inconsistent or unsupported fields."""
    from transformers import LlamaConfig

    require_fields(config, REQUIRED)
    # a missing field means the published class's default, which may be unsupported
    check_supported({**CLASS_DEFAULTS, **config}, SUPPORTED)
    hidden, layers, heads = (read_positive(config, name) for name in ("d_model", "n_layers", "n_heads"))
    size = vocab = read_positive(config, "vocab_size")
    if config.get("embedding_size") is not None:
        size = read_positive(config, "embedding_size")
    with checkpoint_errors("config.json"):
        check_divides("n_heads", heads, "d_model", hidden)
        check_at_most("vocab_size", vocab, "embedding_size", size)
    if hidden // heads % 2:
        raise CheckpointError(
            f"config.json: d_model={hidden} / n_heads={heads} is odd; rotary angles need an even width"
        )
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, heads),
        head_dim=hidden // heads,
        intermediate_size=_mlp_size(config, hidden),
        vocab_size=size,
        max_position_embeddings=read_positive(config, "max_sequence_length"),
        rope_parameters=rope_parameters(config),
        rms_norm_eps=float(read_positive({"rms_norm_eps": 1e-5, **config}, "rms_norm_eps")),
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=bool(read_flag(config, "weight_tying", True)),
        **NEUTRAL,
    )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    multi_query = read_flag(config, "multi_query_attention", None)
    if config.get("n_kv_heads") is None:
        return 1 if multi_query else heads
    kv_heads = read_positive(config, "n_kv_heads")
    if multi_query is not None and kv_heads != (1 if multi_query else heads):
        raise CheckpointError(f"config.json: multi_query_attention={multi_query} contradicts n_kv_heads={kv_heads}")
    with checkpoint_errors("config.json"):
        check_divides("n_kv_heads", kv_heads, "n_heads", heads)
    return kv_heads


def _mlp_size(config: Mapping[str, Any], hidden: int) -> int:
    if config.get("mlp_hidden_size") is not None:
        return read_positive(config, "mlp_hidden_size")
    if config.get("mlp_ratio") is None:
        raise CheckpointError("config.json has neither 'mlp_hidden_size' nor 'mlp_ratio'")
    size = read_positive(config, "mlp_ratio") * hidden
    if not is_finite(size) or int(size) < 1:
        raise CheckpointError(f"config.json: mlp_ratio={config['mlp_ratio']!r} times d_model={hidden} is not a width")
    return int(size)


FAMILY = Family(
    module="LlamaForCausalLM",
    config=llama_config,
    prediction="same",
    key_mapping=KEY_MAPPING,
    default_block_length=32,
    float32_angles=True,
)
