"""Stable-DiffCoder (ByteDance-Seed/Stable-DiffCoder-8B-Base, -Instruct; Fan et al., arXiv 2601.15892) on transformers'
Llama.

config.json has Llama's `model_type`, but other `architectures`. Layers and parameter names are Llama's. Logits row i
predicts token i; attention is block-causal over blocks of 4 counted from position 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paradec.models.checkpoint import read_positive
from paradec.models.family import Family, read_shared_fields
from paradec.models.rotary import rope_parameters
from paradec.models.text.qwen import REQUIRED

SUPPORTED = {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)}
PUBLISHED = re.compile(r"Stable-DiffCoder-8B-(?:Base|Instruct)")
"""Published names; their config.json does not state the block length."""
BLOCK_NAME = "block_length"


def llama_config(config: Mapping[str, Any]) -> Any:
    """The `LlamaConfig` of a `config.json`. Raises CheckpointError for missing, inconsistent or unsupported fields."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **read_shared_fields(config, REQUIRED, SUPPORTED),
        intermediate_size=read_positive(config, "intermediate_size"),
        rope_parameters=rope_parameters(config),
        attention_bias=False,
        mlp_bias=False,
    )


FAMILY = Family(
    module="LlamaForCausalLM",
    config=llama_config,
    prediction="same",
    block_name=BLOCK_NAME,
    published_names=PUBLISHED,
    published_block=4,
    mask_token="<[MASK_TOKEN]>",
)
