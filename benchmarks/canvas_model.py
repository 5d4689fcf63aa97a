"""A small random DiffusionGemma for benchmarks: its canvases settle after a varied number of steps."""

from __future__ import annotations

import warnings
from typing import Any

import torch

PAD = 0
ENDS = [1, 2, 3]
FIRST_TOKEN = 8
"""Ids below are the padding, ends and those of images."""


def small_module(vocab: int = 256, canvas: int = 32, hidden: int = 64, seed: int = 0) -> Any:
    """A `DiffusionGemmaForBlockDiffusion` of two layers, a sliding and a full one, and four experts, float32.

    Logits are products of the last hidden state with the embeddings. These have std 1, other matrices 0.1: with the
    usual small weights every canvas would run to its last step.
    """
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(
        text_config={
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "max_position_embeddings": 4096,
            "pad_token_id": PAD,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        canvas_length=canvas,
        image_token_id=5,
        boi_token_id=6,
        eoi_token_id=7,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 if "embed_tokens" in name else 0.1, generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
    module.generation_config.pad_token_id = PAD
    return module.eval()
