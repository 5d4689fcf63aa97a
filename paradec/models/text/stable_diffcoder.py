"""Stable-DiffCoder checkpoints (ByteDance-Seed/Stable-DiffCoder-8B-Base, -Instruct) on transformers' Llama.

Their `model_type` is "llama": the architecture tells them from a Llama. Same blocks and names; logits row i predicts
token i, attention is block-causal over blocks counted from position 0, of 4 in the published code. Fan et al.,
"Stable-DiffCoder", arXiv 2601.15892.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from paradec.core.checks import shown
from paradec.models.checkpoint import NEUTRAL, CheckpointError, flag, positive, refuse_unless, require
from paradec.models.family import Family
from paradec.models.rotary import rope_parameters
from paradec.models.text.qwen import REQUIRED

ONLY = {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)}
"""Fields that change the maths, and the values that are supported."""
PUBLISHED = re.compile(r"Stable-DiffCoder-8B-(?:Base|Instruct)")
"""Published names; their config.json does not say the block."""
BLOCK_NAME = "block_length"


def is_stable_diffcoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json of `model_type` "llama" is that of a Stable-DiffCoder."""
    names = config.get("architectures")
    return isinstance(names, list) and "StableDiffcoderForCausalLM" in names


def llama_config(config: Mapping[str, Any]) -> Any:
    """The `LlamaConfig` of a Stable-DiffCoder `config.json`.

    Raises:
        CheckpointError: a field is missing, inconsistent, or asks for maths that is not supported.
    """
    from transformers import LlamaConfig

    require(config, REQUIRED)
    refuse_unless(config, ONLY)
    sizes = {name: positive(config, name) for name in REQUIRED if name != "rms_norm_eps"}
    hidden, heads, kv_heads = (sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    width = positive(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    if width % 2 or (config.get("head_dim") is None and hidden % heads):
        raise CheckpointError(
            f"config.json: hidden_size={hidden} over num_attention_heads={heads}, head_dim="
            f"{shown(config.get('head_dim'))}: rotary angles need heads of an even width"
        )
    return LlamaConfig(
        **sizes,
        head_dim=width,
        rope_parameters=rope_parameters(config),
        rms_norm_eps=float(positive(config, "rms_norm_eps")),
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=bool(flag(config, "tie_word_embeddings", False)),
        **NEUTRAL,
    )


def published_block(config: Mapping[str, Any], source: str) -> int | None:
    """4 for a published name."""
    return None if PUBLISHED.fullmatch(os.path.basename(source.rstrip("/"))) is None else 4


FAMILY = Family(
    module="LlamaForCausalLM",
    config=llama_config,
    prediction="same",
    block_name=BLOCK_NAME,
    published_block=published_block,
    mask_token="<[MASK_TOKEN]>",
)
