"""GGUF files with the fields, names, quantization types and row order of llama.cpp's converter."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

INTERLEAVED = ("llada", "llama")
"""Architectures for which the converter reorders the rows of the query and key projections."""
CONFIG_FIELDS = {
    "add_block_count": ("n_layers", "num_hidden_layers"),
    "add_context_length": ("max_sequence_length", "max_position_embeddings"),
    "add_embedding_length": ("d_model", "hidden_size"),
    "add_feed_forward_length": ("mlp_hidden_size", "dense_intermediate_size", "intermediate_size"),
    "add_head_count": ("n_heads", "num_attention_heads"),
    "add_head_count_kv": ("n_kv_heads", "num_key_value_heads"),
    "add_layer_norm_rms_eps": ("rms_norm_eps",),
    "add_rope_freq_base": ("rope_theta",),
    "add_key_length": ("head_dim",),
    "add_value_length": ("head_dim",),
    "add_expert_count": ("num_experts", "num_local_experts"),
    "add_expert_used_count": ("num_experts_per_tok",),
    "add_expert_feed_forward_length": ("moe_intermediate_size", "expert_intermediate_size"),
    "add_mask_token_id": ("mask_token_id",),
    "add_eos_token_id": ("eos_token_id",),
    "add_pad_token_id": ("pad_token_id",),
    "add_bos_token_id": ("bos_token_id",),
}
"""Method of the writer -> alternative names of the field in config.json."""


def architecture_of(config: Mapping[str, Any]) -> str:
    name = str(config["model_type"]).lower().replace("_", "")
    return "llada-moe" if name == "llada" and "num_experts" in config else name


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head of width d from [2, d / 2] to [d / 2, 2]."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def separate(weight: Tensor, heads: int) -> Tensor:
    """Undo `interleave`."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def pack(weight: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantize a matrix. For types that the package `gguf` cannot write, return groups of small random numbers."""
    try:
        return quantize(weight.numpy(), kind)
    except NotImplementedError:
        group, size = GGML_QUANT_SIZES[kind]
        groups = np.random.default_rng(weight.numel()).integers(0, 256, (weight.numel() // group, size), np.uint8)
        if kind == GGMLQuantizationType.Q4_K:  # the first four bytes are scale and minimum
            groups[:, :4] = np.frombuffer(np.float16([0.0004, 0.003]).tobytes(), np.uint8)
        else:
            assert kind == GGMLQuantizationType.Q6_K
            groups[:, -2:] = np.frombuffer(np.float16([0.00005]).tobytes(), np.uint8)
        return groups.reshape(*weight.shape[:-1], -1)


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, size: int, pre: str) -> None:
    """Write the tokenizer's fields. size: entries of the vocabulary, including unused entries. pre: pre-tokenizer."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    kinds = {index: TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED for index, entry in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(size)])
    normal = {index: TokenType.NORMAL for index in names}
    writer.add_token_types([(normal | kinds).get(index, TokenType.UNUSED) for index in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    tokenizer: Any = None,
    pre: str = "gpt-2",
    extra: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """Write the checkpoint of a folder as GGUF; return the dequantized weights under the checkpoint's names.

    kind: quantization type of all matrices except routers. extra: additional header fields; arrays become additional
    tensors. changes: changed fields of config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    rope = config.get("rope_parameters") or {}
    config |= {"rope_theta": config.get("rope_theta", rope.get("rope_theta"))}
    architecture = architecture_of(config)
    writer = GGUFWriter(str(path), architecture)
    for method, names in CONFIG_FIELDS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    if architecture in ("llada", "llada-moe"):
        writer.add_diffusion_shift_logits(False)
    if architecture == "llada":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["d_model"] // config["n_heads"])
        writer.add_add_bos_token(True)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config["vocab_size"], pre)
    heads = config.get("n_heads", config.get("num_attention_heads"))
    kv_heads = config.get("n_kv_heads", config.get("num_key_value_heads"))
    layers = config.get("n_layers", config.get("num_hidden_layers"))
    name_map = get_tensor_name_map(MODEL_ARCH[architecture.upper().replace("-", "_")], layers)
    stored: dict[str, Tensor] = {}
    stacks: dict[str, list[Any]] = {}

    def add(names: list[str], weight: Tensor, heads: int = 0) -> None:
        """Add one tensor. names: one, or one per stacked expert. heads: number of heads to interleave, 0 for none."""
        general = re.sub(r"experts\.\d+", "experts", names[0])
        name = name_map.get_name(general, (".weight", ".bias"))
        assert name is not None, general
        weight = interleave(weight, heads) if heads else weight
        if weight.ndim > 1 and kind != "F32" and "ffn_gate_inp" not in name:
            packed = pack(weight, GGMLQuantizationType[kind])
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType[kind])
            weight = torch.from_numpy(dequantize(packed, GGMLQuantizationType[kind]).reshape(weight.shape))
        else:
            writer.add_tensor(name, weight.numpy())
        weight = separate(weight, heads) if heads else weight
        stored.update(zip(names, weight if len(names) > 1 else [weight], strict=True))

    for name, weight in load_file(folder / "model.safetensors").items():
        weight = weight.float().contiguous()
        if expert := re.search(r"experts\.(\d+)\.", name):
            stacks.setdefault(name.replace(expert.group(), "experts."), []).append((int(expert[1]), name, weight))
        elif architecture in INTERLEAVED and (projection := re.search(r"\.([qk])_proj\.", name)):
            add([name], weight, heads if projection[1] == "q" else kv_heads)
        else:
            add([name], weight)
    for parts in stacks.values():
        parts.sort(key=lambda part: part[0])
        add([name for _, name, _ in parts], torch.stack([weight for *_, weight in parts]))
    for field, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(field, value)
        elif isinstance(value, bool):
            writer.add_bool(field, value)
        elif isinstance(value, (int, float)):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(field, value)
        else:
            writer.add_string(field, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: weight.contiguous() for name, weight in stored.items()}
