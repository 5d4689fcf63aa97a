"""Small DiffusionGemma modules with random weights whose entropies vary, and transformers' `generate` on them."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch

CANVAS = 16
VOCAB = 64
PAD, END = 0, 1


@lru_cache(maxsize=8)
def tiny_module(
    seed: int = 0, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, canvas: int = CANVAS, **text: Any
):
    """Two layers, a sliding and a full one, four experts. With the usual small weights every canvas would run to its
    last step: embeddings have std 1 here, other matrices 0.1, and layer scalars differ."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(
        text_config={
            "vocab_size": vocab,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "max_position_embeddings": 4096,
            "pad_token_id": PAD,
            "eos_token_id": END,
            **text,
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
                std = 1.0 if "embed_tokens" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    module.eval().to(dtype)
    if dtype == torch.float64:
        module.set_experts_implementation("eager")
    settings = {"pad_token_id": PAD, "eos_token_id": None}
    for name, value in settings.items():
        setattr(module.generation_config, name, value)
    return module
