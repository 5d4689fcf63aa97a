"""Dream checkpoints (Dream-org/Dream-v0-7B and kin) on transformers' Qwen2.

Same blocks and names as Qwen2.5, without a causal mask; logits row i - 1 predicts token i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.models.checkpoint import CheckpointError, flag, positive, refuse_unless

ONLY = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
    "use_mrope": (False, None),
    "rope_parameters": (None,),
    "quantization_config": (None,),
}
"""Fields that change the maths, and the values that are supported."""

REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rope_theta",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""The class defaults are wrong for the published 7B, so nothing is filled in."""


def qwen2_config(config: Mapping[str, Any]) -> Any:
    """The `Qwen2Config` that computes what a Dream `config.json` says.

    Raises:
        CheckpointError: a field is missing, inconsistent, or asks for maths that is not supported.
    """
    from transformers import Qwen2Config

    for name in REQUIRED:
        if config.get(name) is None:
            raise CheckpointError(f"config.json has no {name!r}")
    refuse_unless(config, ONLY)
    hidden, heads, kv_heads = (
        positive(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if hidden % heads:
        raise CheckpointError(f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    if hidden // heads % 2:
        raise CheckpointError(
            f"config.json: hidden_size={hidden} / num_attention_heads={heads} is odd; rotary angles need an even width"
        )
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=positive(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_position_embeddings=positive(config, "max_position_embeddings"),
        rope_parameters={"rope_type": "default", "rope_theta": float(positive(config, "rope_theta"))},
        rms_norm_eps=float(positive(config, "rms_norm_eps")),
        hidden_act="silu",
        use_sliding_window=False,
        attention_dropout=0.0,
        tie_word_embeddings=bool(flag(config, "tie_word_embeddings", False)),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
