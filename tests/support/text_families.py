"""A small model of every family of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK = 4
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "mask", *(f"w{index}" for index in range(28))]
"""A vocabulary of 32; the family's name of the mask stands at 3."""
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": False,
    "torch_dtype": "float32",
}
# config.json of JetLM/SDAR-1.7B-Chat but for the sizes
SDAR = SIZES | {
    "model_type": "sdar",
    "architectures": ["SDARForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "head_dim": 6,
    "attention_bias": False,
    "attn_implementation": "flex_attention",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "block_size": BLOCK,
    "fuse_cross_entropy": True,
    "tie_word_embeddings": False,
}
# config.json of Efficient-Large-Model/Fast_dLLM_v2_1.5B but for the sizes
FAST = SIZES | {
    "model_type": "Fast_dLLM_Qwen",
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
        "AutoModel": "modeling.Fast_dLLM_QwenModel",
        "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
    },
    "bd_size": BLOCK,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": True,
}
CONFIGS = {"sdar": SDAR, "fast_dllm_v2": FAST}
MASK_NAMES = {"sdar": "<|MASK|>", "fast_dllm_v2": "|<MASK>|"}
REMOTE_FILES = ("modeling_sdar.py", "configuration_sdar.py", "modeling.py", "configuration.py")


def changed(config: dict[str, Any], /, **fields: Any) -> dict[str, Any]:
    """The config with other values; `...` takes a field out."""
    return {name: value for name, value in (config | fields).items() if value is not ...}


def random_weights(family: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights under the names of the published files, float64."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    wide, narrow = (config[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, size in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):
            shapes[f"{layer}self_attn.{name}.weight"] = (size, hidden)
            if family == "fast_dllm_v2":
                shapes[f"{layer}self_attn.{name}.bias"] = (size,)
        if family == "sdar":
            shapes |= {f"{layer}self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, wide)
        shapes |= {f"{layer}mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) + ("norm" in name)
        for name, shape in shapes.items()
    }


def write_tokenizer(folder: Path, mask: str, states_mask: bool = True) -> None:
    """tokenizer.json and tokenizer_config.json as a checkpoint ships them, with a chat template beside them."""
    words = [mask if word == "mask" else word for word in WORDS]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    table = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": word} | flags for index, word in enumerate(words[:4])],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(words)}, "unk_token": "w0"},
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    } | ({"mask_token": mask} if states_mask else {})
    (folder / "tokenizer.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>{% endfor %}<|im_start|>"
    )


def write(folder: Path, family: str, weights: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """A checkpoint folder in the published format, with remote code that must not run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = changed(CONFIGS[family], **fields)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(family, CONFIGS[family]) if weights is None else weights, folder / "model.safetensors")
    write_tokenizer(folder, MASK_NAMES[family])
    for name in REMOTE_FILES:
        (folder / name).write_text("raise SystemExit('remote code was run')")
    return folder
