"""Nemotron-Labs-Diffusion checkpoints (nvidia/Nemotron-Labs-Diffusion-3B, -8B, -14B) on transformers' Ministral3.

Ministral3's blocks under other names: YaRN angles, queries scaled by position. One model in three modes: token by token
(`load(topology="causal")`); in blocks from the prompt's end, each of which sees itself and what a causal call made of
all that is final before it (topology "causal_context", the default); in blocks over blocks (`topology="block_causal"`).
Causal rows predict the next token, rows of an open block their own. "Nemotron-Labs-Diffusion", arXiv 2607.05722.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.models.checkpoint import read_positive
from paradec.models.family import Family, read_shared_fields
from paradec.models.rotary import rope_parameters
from paradec.models.text.qwen import REQUIRED

KEY_MAPPING = {r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."}
"""Checkpoint names -> Ministral3's."""
ONLY = {
    "dlm_paradigm": ("bidirectional",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
}
"""Fields that change the maths, and the values that are supported."""
SCALE = "llama_4_scaling_beta"
"""The field of `rope_parameters` for the growth of queries with the logarithm of their position."""
BLOCK_NAME = "block_size"
ADAPTER = "linear_spec_lora"
"""The folder of the draft adapter."""


def ministral3_config(config: Mapping[str, Any]) -> Any:
    """The `Ministral3Config` of a config.json. Raises CheckpointError for missing, inconsistent or unsupported
    fields."""
    from transformers import Ministral3Config

    fields = read_shared_fields(config, ("dlm_paradigm", *REQUIRED, "head_dim"), ONLY)
    angles = {
        SCALE: 0.0,
        "original_max_position_embeddings": fields["max_position_embeddings"],  # read even where nothing is scaled
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
