"""Small checkpoints in published formats: LLaDA, Dream, SDAR, Fast-dLLM v2, and mixtures of experts."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from places import GOLDEN
from recorded import golden, read_json, read_json_unrecorded
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec.models.adapter import Model

# part of a transformer block -> its name in the file
LLADA_PARTS = {
    "attn_norm": "attn_norm", "mlp_norm": "ff_norm", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out",
    "gate": "ff_proj", "up": "up_proj", "down": "ff_out",
}  # fmt: skip
DREAM_PARTS = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
LLADA = {
    "model_type": "llada", "d_model": 16, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 24, "vocab_size": 20,
    "max_sequence_length": 32, "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms",
    "include_bias": False, "rope": True, "rope_theta": 1000.0, "weight_tying": False, "mask_token_id": 19,
    "eos_token_id": 18,
}  # fmt: skip
DREAM = {
    "model_type": "Dream", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 20, "max_position_embeddings": 32,
    "rope_theta": 1000.0, "rms_norm_eps": 1e-6, "mask_token_id": 19, "eos_token_id": 18,
}  # fmt: skip


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
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
        "attn_norm": (hidden,), "mlp_norm": (hidden,), "q": (hidden, hidden), "k": (narrow, hidden),
        "v": (narrow, hidden), "o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip
    for index in range(layers):
        for part, shape in shapes.items():
            name = layer.format(index) + parts[part]
            weights[f"{name}.weight"] = draw(*shape) + (1 if part.endswith("norm") else 0)
            if not llada and part in "qkv":
                weights[f"{name}.bias"] = draw(shape[0])
    return weights


def write_checkpoint(folder: Path, config: Any, weights: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("config.json").write_text(json.dumps(config))
    weights = random_weights(config) if weights is None else weights
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def changed(config: dict[str, Any], /, **fields: Any) -> dict[str, Any]:
    """Return the config with changed fields. The value `...` removes a field."""
    return {name: value for name, value in (config | fields).items() if value is not ...}


def logits(model: Any, ids: list[int]) -> Tensor:
    """Return logits [row length, vocabulary] of one row, computed by the module without paradec's adapter."""
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 19]


def shard(folder: Path, to: Path) -> dict[str, str]:
    """Copy a checkpoint with its weights in two files; return the map from weight to file."""
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


FAMILY_BLOCK = 4
FAMILY_WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "mask", *(f"w{index}" for index in range(28))]
"""A vocabulary of 32; entry 3 becomes the family's mask token."""
FAMILY_SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "rope_theta": 1000000, "rope_scaling": None,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 28, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": False,
    "torch_dtype": "float32",
}  # fmt: skip
# config.json of JetLM/SDAR-1.7B-Chat with smaller sizes
SDAR = FAMILY_SIZES | {
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
    "block_size": FAMILY_BLOCK,
    "fuse_cross_entropy": True,
    "tie_word_embeddings": False,
}
# config.json of Efficient-Large-Model/Fast_dLLM_v2_1.5B with smaller sizes
FAST_DLLM = FAMILY_SIZES | {
    "model_type": "Fast_dLLM_Qwen",
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
        "AutoModel": "modeling.Fast_dLLM_QwenModel",
        "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
    },
    "bd_size": FAMILY_BLOCK,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": True,
}
CONFIGS = {"sdar": SDAR, "fast_dllm_v2": FAST_DLLM}
MASK_NAMES = {"sdar": "<|MASK|>", "fast_dllm_v2": "|<MASK>|"}
REMOTE_FILES = ("modeling_sdar.py", "configuration_sdar.py", "modeling.py", "configuration.py")


def family_weights(family: str, config: dict[str, Any]) -> dict[str, Tensor]:
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
    """Write tokenizer files. mask: text of the mask token. states_mask: whether tokenizer_config.json names it."""
    words = [mask if word == "mask" else word for word in FAMILY_WORDS]
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
    template = "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>{% endfor %}<|im_start|>"
    (folder / "chat_template.jinja").write_text(template)


def write_family(folder: Path, family: str, weights: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """Write SDAR or Fast-dLLM v2 as published, with remote code that must not run. fields: changes of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(changed(CONFIGS[family], **fields)))
    save_file(family_weights(family, CONFIGS[family]) if weights is None else weights, folder / "model.safetensors")
    write_tokenizer(folder, MASK_NAMES[family])
    for name in REMOTE_FILES:
        (folder / name).write_text("raise SystemExit('remote code was run')")
    return folder


MOE = GOLDEN / "moe"
MOE_NAMES = ("llada2-tiny", "llada-moe-tiny", "sdar-moe-tiny")
MOE_RECORDED = golden("moe")
MOE_CHECKPOINTS = sorted(path.parent for path in MOE_RECORDED.glob("*/forwards.json"))


def moe_forwards(name: str | Path) -> dict[str, Any]:
    return read_json(MOE / name / "forwards.json")


def moe_format(name: str | Path) -> str:
    """Return the name of the packaged checkpoint (in `MOE_NAMES`) that has the format of this checkpoint."""
    kind = read_json_unrecorded(MOE / name / "config.json")["model_type"]
    return {"llada2_moe": "llada2-tiny", "llada": "llada-moe-tiny", "sdar_moe": "sdar-moe-tiny"}[kind]


def moe_facts(name: str | Path) -> dict[str, Any]:
    facts = moe_forwards(name)["facts"]
    block = {"block_length": facts["block"]} if moe_format(name) == "llada2-tiny" else {}
    return {"mask_token_id": facts["mask"]} | block


def golden_moe(
    name: str | Path, dtype: str = "float32", block_length: int | None = None, mask_token_id: int | None = None
) -> Model:
    """Load a mixture of experts once. block_length, mask_token_id: replace the values in `forwards.json`."""
    return _load_moe(MOE / name, dtype, block_length, mask_token_id)


@functools.cache
def _load_moe(folder: Path, dtype: str, block_length: int | None, mask_token_id: int | None) -> Model:
    replacements = {"block_length": block_length, "mask_token_id": mask_token_id}
    facts = moe_facts(folder) if (folder / "forwards.json").exists() else {}
    facts |= {name: value for name, value in replacements.items() if value is not None}
    return paradec.load(folder, dtype=dtype, **facts)


MOE_SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MOE_FIELDS: dict[str, dict[str, Any]] = {
    "llada2-tiny": {
        "head_dim": 8, "rotary_dim": 4, "intermediate_size": 12, "moe_intermediate_size": 6, "n_group": 2,
        "topk_group": 1, "block_length": 4,
    },
    "llada-moe-tiny": {"expert_intermediate_size": 6, "dense_intermediate_size": 12, "moe_layer_freq": [0, 1]},
    "sdar-moe-tiny": {
        "head_dim": 6, "intermediate_size": 12, "moe_intermediate_size": 6, "mlp_only_layers": [0], "block_size": 4,
    },
}  # fmt: skip


def small_config(name: str, **fields: Any) -> dict[str, Any]:
    """Return the config of a packaged mixture of experts with small sizes and changed fields."""
    config = json.loads((MOE / name / "config.json").read_text())
    config.pop("mask_token_id", None)
    return config | MOE_SIZES | MOE_FIELDS[name] | fields


def small_weights(name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, vocab, experts = (config[field] for field in ("hidden_size", "vocab_size", "num_experts"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    wide, narrow = heads * width, kv_heads * width
    inner = config.get("moe_intermediate_size", config.get("expert_intermediate_size"))
    dense = config.get("intermediate_size", config.get("dense_intermediate_size"))
    embeddings = "model.word_embeddings.weight" if name == "llada2-tiny" else "model.embed_tokens.weight"
    shapes: dict[str, tuple[int, ...]] = {embeddings: (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        shapes |= {f"{place}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if name == "llada2-tiny":
            shapes[f"{place}attention.query_key_value.weight"] = (wide + 2 * narrow, hidden)
            shapes |= {f"{place}attention.{norm}_layernorm.weight": (width,) for norm in ("query", "key")}
            shapes[f"{place}attention.dense.weight"] = (hidden, wide)
        else:
            sizes = zip("qkv", (wide, narrow, narrow), strict=True)
            shapes |= {f"{place}self_attn.{part}_proj.weight": (rows, hidden) for part, rows in sizes}
            shapes |= {f"{place}self_attn.{part}_norm.weight": (width,) for part in "qk"}
            shapes[f"{place}self_attn.o_proj.weight"] = (hidden, wide)
        mlps = {"": dense}
        if layer:
            shapes[f"{place}mlp.gate.weight"] = (experts, hidden)
            mlps = {f"experts.{index}.": inner for index in range(experts)}
        if layer and name == "llada2-tiny":
            shapes[f"{place}mlp.gate.expert_bias"] = (experts,)
            mlps["shared_experts."] = inner
        for part, rows in mlps.items():
            shapes |= {f"{place}mlp.{part}{half}_proj.weight": (rows, hidden) for half in ("gate", "up")}
            shapes[f"{place}mlp.{part}down_proj.weight"] = (hidden, rows)
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) + ("norm" in key)
        for key, shape in shapes.items()
    }
    # transformers keeps expert biases in float32 for every dtype of the model
    return {key: value.float() if key.endswith("expert_bias") else value for key, value in weights.items()}
