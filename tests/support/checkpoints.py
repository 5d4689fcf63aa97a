"""Checkpoints in the published formats, written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# part of a block -> its name in the file
LLADA_PARTS = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ff_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
DREAM_PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
LLADA = {
    "model_type": "llada",
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "mlp_hidden_size": 24,
    "vocab_size": 20,
    "max_sequence_length": 32,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "include_bias": False,
    "rope": True,
    "rope_theta": 1000.0,
    "weight_tying": False,
    "mask_token_id": 19,
    "eos_token_id": 18,
}
DREAM = {
    "model_type": "Dream",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 20,
    "max_position_embeddings": 32,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-6,
    "mask_token_id": 19,
    "eos_token_id": 18,
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights of the right names and shapes for a small config, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)

    llada = config["model_type"] == "llada"
    if llada:
        hidden, layers, heads = config["d_model"], config["n_layers"], config["n_heads"]
        kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
        inner = config.get("mlp_hidden_size") or int(config["mlp_ratio"] * hidden)
        rows = config.get("embedding_size") or config["vocab_size"]
        parts, layer, tied = LLADA_PARTS, "model.transformer.blocks.{}.", config.get("weight_tying", True)
        names = ("model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ff_out.weight")
    else:
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads, inner, rows = config["num_key_value_heads"], config["intermediate_size"], config["vocab_size"]
        parts, layer, tied = DREAM_PARTS, "model.layers.{}.", config.get("tie_word_embeddings", False)
        names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    narrow = hidden // heads * kv_heads
    weights = {names[0]: draw(rows, hidden), names[1]: 1 + draw(hidden)}
    if not tied:
        weights[names[2]] = draw(rows, hidden)
    shapes = {
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
        "q": (hidden, hidden),
        "k": (narrow, hidden),
        "v": (narrow, hidden),
        "o": (hidden, hidden),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    for index in range(layers):
        for part, shape in shapes.items():
            name = layer.format(index) + parts[part]
            weights[f"{name}.weight"] = draw(*shape) + (1 if part.endswith("norm") else 0)
            if not llada and part in "qkv":
                weights[f"{name}.bias"] = draw(shape[0])
    return weights


def write(folder: Path, config: Any, weights: dict[str, Tensor] | None = None) -> Path:
    """A checkpoint folder of a config and weights (random ones by default)."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(config))
    weights = random_weights(config) if weights is None else weights
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def changed(config: dict[str, Any], /, **fields: Any) -> dict[str, Any]:
    """The config with other values; `...` takes a field out."""
    return {name: value for name, value in (config | fields).items() if value is not ...}


def logits(model: Any, ids: list[int]) -> Tensor:
    """[L, V] logits of one row, as the module that was loaded computes them."""
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 19]


def shard(folder: Path, to: Path) -> dict[str, str]:
    """Split model.safetensors into two shards with an index; returns the index's weight_map."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("model.safetensors"))
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, to / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_index(to, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps(index))
