"""Nemotron-Labs-Diffusion (nvidia/Nemotron-Labs-Diffusion-3B, -8B, -14B; arXiv 2607.05722) on transformers' Ministral3.

The network is Ministral3 under other names, with YaRN angles and queries scaled by position. It has three modes: token
by token (`load(topology="causal")`); blocks after the prompt over a causal context ("causal_context", the default);
block-causal (`topology="block_causal"`). Logits of causal columns predict the next token; logits of columns in an open
block predict the column's own token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.models.checkpoint import read_positive
from paradec.models.family import Family, read_shared_fields
from paradec.models.rotary import rope_parameters
from paradec.models.text.qwen import REQUIRED

KEY_MAPPING = {r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."}
SUPPORTED = {
    "dlm_paradigm": ("bidirectional",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
}
SCALE = "llama_4_scaling_beta"
"""The field of `rope_parameters` for the factor of queries, which grows with the logarithm of the position."""
BLOCK_NAME = "block_size"
ADAPTER = "linear_spec_lora"


def ministral3_config(config: Mapping[str, Any]) -> Any:
    """The `Ministral3Config` of a config.json. Raises CheckpointError for a missing, inconsistent or unsupported
    field."""
    from transformers import Ministral3Config

    fields = read_shared_fields(config, ("dlm_paradigm", *REQUIRED, "head_dim"), SUPPORTED)
    angles = {
        SCALE: 0.0,
        "original_max_position_embeddings": fields["max_position_embeddings"],  # required even without scaling
        **rope_parameters(config, extra_fields=(SCALE,)),
    }
    inner = read_positive(config, "intermediate_size")
    return Ministral3Config(**fields, intermediate_size=inner, rope_parameters=angles, sliding_window=None)


FAMILY = Family(
    module="Ministral3ForCausalLM",
    config=ministral3_config,
    prediction="same",
    key_mapping=KEY_MAPPING,
    block_name=BLOCK_NAME,
    modes=("causal_context", "causal", "block_causal"),
    draft_adapter=ADAPTER,
)
