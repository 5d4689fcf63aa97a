"""GGUF files (llama.cpp's format): the header, weights that are unpacked one by one, and the config.json and tokenizer
of masked models.

The header is checked first; reading it takes memory only for its entries. The package gguf unpacks weights."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import short_repr
from paradec.models.checkpoint import CheckpointError, checkpoint_errors, fetch
from paradec.models.text import llada

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Kinds of scalars -> `struct`'s format characters."""
TEXT, ARRAY = 8, 9
MAX_ENTRIES = 2**22
"""Maximum number of entries in a table or list of texts; large vocabularies have 2^18."""
CHUNK = 2**20
"""Number of weights that are unpacked at a time; it bounds the memory in float32."""
PLAIN = ("F32", "F16", "BF16")
"""Kinds of tensors that are not quantised."""

MASKED = ("llada", "dream", "llada-moe", "rnd1")
"""Architectures of masked diffusion models."""
CAUSAL = ("llama", "qwen2", "qwen3", "qwen3moe")
"""Architectures of causal models whose weights this file reads; transformers reads other architectures' weights."""
INTERLEAVED = ("llada", "llama")
"""Architectures whose files interleave the two halves of each head of queries and keys."""
SHIFT = "diffusion_shift_logits"
"""Field that `build_config` adds to config.json if `diffusion.shift_logits` differs from the family's prediction."""

LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""GGUF's names of a layer's weights -> Llama's and Qwen's names. Braces stand for the index of an expert."""
WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
WEIGHTS |= {f"blk.{{}}.{name}": f"model.layers.{{}}.{published}" for name, published in LAYER_WEIGHTS.items()}
LLADA_NAMES = {
    new.rstrip(".").replace(r"\1", "{}"): re.sub(r"\(.*?\)", "{}", old.strip("^")).replace("\\.", ".").rstrip(".")
    for old, new in llada.KEY_MAPPING.items()
}
"""Llama's names -> LLaDA's."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisors of rotary angles in Llama 3.1's scaling."""

LLADA_FIELDS = {
    "d_model": "embedding_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "mlp_hidden_size": "feed_forward_length",
    "max_sequence_length": "context_length",
}
QWEN_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
INNER, EXPERTS_INNER = "feed_forward_length", "expert_feed_forward_length"
EXPERT_FIELDS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
FIELDS = {
    "llada": LLADA_FIELDS,
    "dream": QWEN_FIELDS | {"intermediate_size": INNER},
    "llada-moe": QWEN_FIELDS | EXPERT_FIELDS | {"expert_intermediate_size": EXPERTS_INNER},
    "rnd1": QWEN_FIELDS | EXPERT_FIELDS | {"intermediate_size": INNER, "moe_intermediate_size": EXPERTS_INNER},
}
"""Architecture -> {field of the published config.json: field of the header}."""
LLADA_CONSTANTS = {name: allowed[0] for name, allowed in llada.SUPPORTED.items()}
CONSTANTS: dict[str, dict[str, Any]] = {
    "llada": LLADA_CONSTANTS | {"model_type": "llada", "architectures": ["LLaDAModelLM"]},
    "dream": {"model_type": "Dream", "architectures": ["DreamModel"]},
    "llada-moe": {"model_type": "llada", "architectures": ["LLaDAMoEModel"], "qk_layernorm": True},
    "rnd1": {"model_type": "rnd1", "architectures": ["RND1LM"], "norm_topk_prob": True},
}
"""Fields of config.json that the architecture implies."""
SCALING_FIELDS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
SPECIAL_TOKENS = {"mask": "mask", "eos": "eos", "pad": "padding", "bos": "bos", "unk": "unknown"}
"""transformers' names of special tokens -> GGUF's."""

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Types of tokens."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BAILING_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPLITS = {"qwen2": QWEN_SPLIT, "gpt-2": ""} | dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING_SPLIT)
"""`tokenizer.ggml.pre` -> pattern by which the published tokenizer splits text; empty for GPT-2's built-in pattern."""


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor. Indexing it (`tensor[...]`) unpacks it, like a slice of a safetensors file.

    blocks: uint8 [rows, bytes]. kind: gguf's type. shape: in torch's order. dtype: of the unpacked tensor.
    heads: number of heads if the two halves of each head's rows are interleaved, else 0."""

    blocks: Any
    kind: Any
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    heads: int = 0

    def __getitem__(self, index: Any) -> Tensor:
        from gguf.quants import dequantize

        result = torch.empty(len(self.blocks), self.shape[-1], dtype=self.dtype)
        rows = max(1, CHUNK // self.shape[-1])
        for start in range(0, len(result), rows):
            unpacked = dequantize(np.array(self.blocks[start : start + rows]), self.kind)
            result[start : start + rows] = torch.from_numpy(unpacked)
        if self.heads:  # rows of a head: [d / 2, 2] -> [2, d / 2]
            result = result.view(self.heads, -1, 2, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        return result.view(self.shape)[index]


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file. fields: numbers, texts, lists of texts and arrays. tensors: by the file's names."""

    path: str
    architecture: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def has_packed_layers(self, min_weights: int) -> bool:
        """Whether a layer has a quantised weight with at least `min_weights` entries."""
        packed = {name: tensor.shape for name, tensor in self.tensors.items() if tensor.kind.name not in PLAIN}
        return any(name.startswith("blk.") and prod(shape) >= min_weights for name, shape in packed.items())

    def read_number(self, name: str, default: Any = None) -> Any:
        """Read a positive number from the architecture's fields. Raises CheckpointError for anything else."""
        key = f"{self.architecture}.{name}"
        value = self.fields.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path!r} has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.path!r}: {key}={short_repr(value)} must be a positive number")
        return value if isinstance(value, int) else float(str(np.float32(value)))  # 1e-5, not 9.99999974e-06

    def read_weights(self, dtype: Any) -> dict[str, GgufTensor]:
        """Return the tensors under the published checkpoint's names, which unpack to `dtype`. Raises CheckpointError
        for a tensor that is unknown or has a wrong shape."""
        weights: dict[str, GgufTensor] = {}
        for name, tensor in self.tensors.items():
            if name == ROPE_FACTORS:
                continue
            part, _, suffix = name.rpartition(".")
            layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
            part = part if layer is None else f"blk.{{}}.{layer[2]}"
            published = WEIGHTS.get(part, "")
            published = LLADA_NAMES.get(published, "") if self.architecture == "llada" else published
            if not published or suffix not in ("weight", "bias"):
                raise CheckpointError(f"{self.path!r} holds {name}, which is not a weight of {self.architecture!r}")
            published = (published if layer is None else published.replace("{}", str(int(layer[1])), 1)) + f".{suffix}"
            tensor, heads = replace(tensor, dtype=dtype), 0
            if self.architecture in INTERLEAVED and part in ("blk.{}.attn_q", "blk.{}.attn_k"):
                heads = self.read_number("attention.head_count")
                heads = heads if part.endswith("q") else self.read_number("attention.head_count_kv", heads)
            if "{}" not in published and (not heads or tensor.shape[0] % (2 * heads) == 0):
                weights[published] = replace(tensor, heads=heads)
            elif "{}" in published and len(tensor.shape) == 3:
                for index, blocks in enumerate(np.split(tensor.blocks, tensor.shape[0])):
                    weights[published.format(index)] = replace(tensor, blocks=blocks, shape=tensor.shape[1:])
            else:
                raise CheckpointError(f"{self.path!r}: {name} is {list(tensor.shape)}, which does not fit its header")
        return weights

    def build_config(self) -> dict[str, Any]:
        """The config.json of a masked model's published checkpoint. Raises CheckpointError for a missing field."""
        if "token_embd.weight" not in self.tensors:
            raise CheckpointError(f"{self.path!r} holds no token_embd.weight")
        vocab_size, is_tied = self.tensors["token_embd.weight"].shape[0], "output.weight" not in self.tensors
        heads = self.read_number("attention.head_count")
        width = self.read_number("attention.key_length", self.read_number("embedding_length") // heads)
        if self.read_number("rope.dimension_count", width) != width:
            raise CheckpointError(f"{self.path!r} rotates only a part of each head, unlike {self.architecture!r}")
        defaults = {"attention.head_count_kv": heads, "attention.key_length": width}
        fields = {name: self.read_number(key, defaults.get(key)) for name, key in FIELDS[self.architecture].items()}
        config = CONSTANTS[self.architecture] | fields
        config |= {"vocab_size": vocab_size, "tie_word_embeddings": is_tied, "weight_tying": is_tied}
        config["rms_norm_eps"] = self.read_number("attention.layer_norm_rms_epsilon")
        config["rope_theta"] = self.read_number("rope.freq_base", 10000.0)
        prefix = f"{self.architecture}.rope.scaling"
        scaling = self.fields.get(f"{prefix}.type", "none")
        if scaling != "none":
            keys = [key for key in SCALING_FIELDS if f"{prefix}.{key}" in self.fields]
            numbers = {SCALING_FIELDS[key]: self.read_number(f"rope.scaling.{key}") for key in keys}
            config["rope_scaling"] = {"rope_type": scaling} | numbers
        ids = {name: self.fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
        config |= {f"{name}_token_id": token_id for name, token_id in ids.items() if token_id is not None}
        is_shifted = self.fields.get("diffusion.shift_logits")
        if is_shifted is not None and is_shifted != (self.architecture in ("dream", "rnd1")):
            config[SHIFT] = is_shifted
        return config

    def build_tokenizer(self) -> Any:
        """The byte-level tokenizer of a masked model; None if the file has none. Raises CheckpointError for tokenizers
        of other kinds."""
        fields = {name.removeprefix("tokenizer.ggml."): value for name, value in self.fields.items()}
        tokens, model, pre = (fields.get(name) for name in ("tokens", "model", "pre"))
        if tokens is None:
            return None
        if model != "gpt2" or pre not in SPLITS:
            raise CheckpointError(
                f"{self.path!r}: a tokenizer with tokenizer.ggml.model={short_repr(model)} and tokenizer.ggml.pre="
                f"{short_repr(pre)} is not supported; supported: 'gpt2' with {', '.join(map(repr, SPLITS))}"
            )
        with checkpoint_errors(f"the tokenizer of {self.path!r} cannot be read", Exception):
            tokenizer = self._build_byte_level(fields, tokens, pre)
        return tokenizer

    def _build_byte_level(self, fields: Mapping[str, Any], tokens: list[str], pre: str) -> Any:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        types = [int(kind) for kind in fields.get("token_type", [1] * len(tokens))]
        ids = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
        merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", [])]
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
        splits = [] if not SPLITS[pre] else [pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        for token, kind in zip(tokens, types, strict=True):
            if kind in (CONTROL, USER_DEFINED):
                tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
        special_ids = {name: fields.get(f"{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
        special = {f"{name}_token": tokens[token_id] for name, token_id in special_ids.items() if token_id is not None}
        # llama.cpp's converter sets add_bos_token for every LLaDA, but the published tokenizer adds no token
        if fields.get("add_bos_token") and "bos_token" in special and self.architecture != "llada":
            bos = special["bos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, ids[bos])]
            )
        template = fields.get("tokenizer.chat_template")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


# ---- the header -----------------------------------------------------------------------------------------------------


def read_gguf(source: str, gguf_file: str, revision: str | None) -> GgufFile:
    """Read the header of a file in a folder or repository. Raises CheckpointError for a file that is missing, cut short
    or damaged, or has a tensor of an unknown kind."""
    path = fetch(source, gguf_file, revision)
    if path is None:
        raise CheckpointError(f"{source!r} has no {gguf_file}")
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{str(path)!r} needs the package gguf: install paradec's extra 'gguf', e.g. pip install -e '.[gguf]'"
        )
    with checkpoint_errors(f"{str(path)!r} cannot be read as a GGUF file", OSError, ValueError):
        file = _HeaderReader(path).read()
    return file


class _HeaderReader:
    """Reader of a file's header, from the first byte on. Raises ValueError for a wrong header."""

    def __init__(self, path: Path):
        self.path, self.data, self.offset = path, np.memmap(path, np.uint8, "r"), 0

    def read(self) -> GgufFile:
        if bytes(self.read_bytes(4)) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = self.read_scalar("I")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}; versions 2 and 3 of little-endian files are read")
        num_tensors, num_fields = self.read_count("tensors"), self.read_count("fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self.read_text()
            if name in fields:
                raise ValueError(f"it has {short_repr(name)} twice")
            fields[name] = self.read_value(name)
        architecture, alignment = fields.get("general.architecture"), fields.get("general.alignment", 32)
        if not isinstance(architecture, str):
            raise ValueError("it has no 'general.architecture'")
        if fields.get("split.count", 1) != 1:
            raise ValueError(f"it is one of {fields['split.count']} parts; join them with llama-gguf-split --merge")
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment={short_repr(alignment)} must be a positive integer")
        layers = fields.get(f"{architecture}.block_count")
        if isinstance(layers, int) and layers > num_tensors:
            raise ValueError(f"it states {layers:,} layers, but only {num_tensors:,} tensors")
        entries = [self.read_entry() for _ in range(num_tensors)]
        start, tensors = -(-self.offset // alignment) * alignment, dict[str, GgufTensor]()
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ValueError(f"it has the tensor {short_repr(name)} twice")
            tensors[name] = self.map_tensor(name, shape, kind, start + offset)
        return GgufFile(str(self.path), architecture, fields, tensors)

    def read_bytes(self, size: int) -> Any:
        if size > len(self.data) - self.offset:
            raise ValueError(f"it is cut short: its header goes beyond its {len(self.data):,} bytes")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def read_scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.read_bytes(struct.calcsize(f"<{code}")))[0]

    def read_count(self, noun: str) -> int:
        count = self.read_scalar("Q")
        if count > MAX_ENTRIES:
            raise ValueError(f"it states {count:,} {noun}; at most {MAX_ENTRIES:,} are read")
        return int(count)

    def read_text(self) -> str:
        return bytes(self.read_bytes(self.read_scalar("Q"))).decode()

    def read_value(self, name: str) -> Any:
        kind = self.read_scalar("I")
        if kind in SCALARS:
            return self.read_scalar(SCALARS[kind])
        if kind == TEXT:
            return self.read_text()
        item_kind = self.read_scalar("I") if kind == ARRAY else None
        if item_kind == TEXT:
            return [self.read_text() for _ in range(self.read_count(f"texts in {short_repr(name)}"))]
        if item_kind not in SCALARS:
            raise ValueError(f"{short_repr(name)} has values of the unknown kind {item_kind or kind}")
        dtype = np.dtype(SCALARS[item_kind]).newbyteorder("<")
        return self.read_bytes(self.read_scalar("Q") * dtype.itemsize).view(dtype)

    def read_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in torch's order, kind and offset of a tensor."""
        name, num_sizes = self.read_text(), self.read_scalar("I")
        if not 1 <= num_sizes <= 4:
            raise ValueError(f"the tensor {short_repr(name)} has {num_sizes} sizes; tensors have 1 to 4")
        sizes = [self.read_scalar("Q") for _ in range(num_sizes)]
        return name, tuple(reversed(sizes)), self.read_scalar("I"), self.read_scalar("Q")

    def map_tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(number)
            group, group_bytes = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, group_bytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            reason = f"the tensor {short_repr(name)} is of kind {number}, which the package gguf does not unpack"
            raise ValueError(reason) from None
        if min(shape) < 1 or shape[-1] % group:
            raise ValueError(f"the tensor {short_repr(name)} is {list(shape)}, which {kind.name} cannot hold")
        rows, row_bytes = prod(shape[:-1]), shape[-1] // group * group_bytes
        if start + rows * row_bytes > len(self.data):
            raise ValueError(
                f"it is cut short: {short_repr(name)} ends at byte {start + rows * row_bytes:,} of its "
                f"{len(self.data):,}"
            )
        return GgufTensor(self.data[start : start + rows * row_bytes].reshape(rows, row_bytes), kind, shape)
