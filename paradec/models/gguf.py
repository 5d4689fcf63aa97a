"""GGUF files (llama.cpp's format): the header, weights that are unpacked one by one, and the config.json and tokenizer
of masked models. Arrays of weights are unpacked by the package gguf.

Sizes, offsets and kinds are checked from the header, which takes memory for its own entries alone.
"""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.models.checkpoint import CheckpointError, StoredTensor, checkpoint_errors, fetch

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's kinds of values -> `struct`'s."""
TEXT, ARRAY = 8, 9
MAX_ENTRIES = 2**22
"""Entries of a table or array of texts at most; the largest vocabularies have 2^18."""
CHUNK = 2**22
"""Weights that are unpacked at a time, which bounds the memory in float32."""
PLAIN = ("F32", "F16", "BF16")
"""Kinds of numbers that are not packed in groups."""
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Types of tokens."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""GGUF's names of weights -> those of checkpoints with Llama's and Qwen's names. Braces: one for each expert."""
LLADA_OUTER = {"token_embd": "wte", "output_norm": "ln_f", "output": "ff_out"}
LLADA_LAYER = {
    **{"attn_norm": "attn_norm", "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "attn_out"},
    **{"ffn_norm": "ff_norm", "ffn_gate": "ff_proj", "ffn_up": "up_proj", "ffn_down": "ff_out"},
}
"""The same for LLaDA's names, after "model.transformer." and "blocks.N."."""
MASKED = ("llada", "dream", "llada-moe", "rnd1")
"""Architectures of masked diffusion models."""
CAUSAL = ("llama", "qwen2", "qwen3", "qwen3moe")
"""Architectures of causal models whose weights are read here; transformers reads the others."""
PERMUTED = ("llada", "llama")
"""Architectures whose queries and keys are stored with the two halves of each head interleaved."""
IGNORED = ("rope_freqs.weight",)
"""What llama.cpp derives from the config."""
SHIFT = "diffusion_shift_logits"
"""The field of config.json for a `diffusion.shift_logits` that is not that of the family."""

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPLITS = {
    "qwen2": _QWEN_SPLIT,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING_SPLIT),
    "gpt-2": None,
}
"""`tokenizer.ggml.pre` -> the pattern of the published tokenizer by which text is split; None is GPT-2's own."""


class GgufTensor:
    """A stored tensor, which `[...]` unpacks, as from a slice of a safetensors file.

    blocks: uint8 [rows, bytes]. shape: torch's. heads: of permuted rows, else 0. dtype: of the unpacked tensor."""

    def __init__(self, blocks: Any, kind: Any, shape: tuple[int, ...]):
        self.blocks, self.kind, self.shape = blocks, kind, shape
        self.heads, self.dtype = 0, torch.float32

    def __getitem__(self, index: Any) -> Tensor:
        from gguf.quants import dequantize

        result = torch.empty(len(self.blocks), self.shape[-1], dtype=self.dtype)
        rows = max(1, CHUNK // self.shape[-1])
        for start in range(0, len(result), rows):
            part = np.array(self.blocks[start : start + rows])
            result[start : start + rows] = torch.from_numpy(dequantize(part, self.kind))
        if self.heads:  # rows of a head: [d / 2, 2] -> [2, d / 2]
            result = result.view(self.heads, -1, 2, self.shape[-1]).transpose(1, 2).reshape(result.shape)
        return result.view(self.shape)[index]

    def split_experts(self) -> list[GgufTensor]:
        parts = np.split(self.blocks, self.shape[0])
        return [GgufTensor(part, self.kind, self.shape[1:]) for part in parts]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file's header. tensors: by GGUF's names."""

    path: str
    architecture: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def has_packed_layers(self, min_weights: int) -> bool:
        """Whether layers of at least so many weights are stored in less than 16 bits."""
        packed = {name: tensor.shape for name, tensor in self.tensors.items() if tensor.kind.name not in PLAIN}
        return any(name.startswith("blk.") and prod(shape) >= min_weights for name, shape in packed.items())

    def read_number(self, name: str, default: Any = None) -> Any:
        """A positive number of the architecture's fields. Raises CheckpointError for anything else, or none."""
        key = f"{self.architecture}.{name}"
        value = self.fields.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path!r} has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.path!r}: {key}={shown(value)} must be a positive number")
        return value

    def weights(self, dtype: Any) -> dict[str, GgufTensor]:
        """The tensors under the names of the published checkpoint, which become `dtype`. Raises CheckpointError for a
        tensor that the architecture does not have."""
        outer, layer, prefix, layer_prefix = OUTER, LAYER, "", "model.layers"
        if self.architecture == "llada":
            outer, layer, prefix, layer_prefix = LLADA_OUTER, LLADA_LAYER, "model.transformer.", "blocks"
        weights: dict[str, GgufTensor] = {}
        for name, tensor in self.tensors.items():
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
            part = None if match is None else (outer if match[1] is None else layer).get(match[2])
            if match is None or part is None:
                if name in IGNORED:
                    continue
                raise CheckpointError(f"{self.path!r} holds {name}, which is no weight of {self.architecture!r}")
            published = f"{prefix}{part}" if match[1] is None else f"{prefix}{layer_prefix}.{int(match[1])}.{part}"
            published = f"{published}.{match[3]}"
            if "{}" in published:
                if len(tensor.shape) != 3:
                    raise CheckpointError(f"{self.path!r}: {name} is {list(tensor.shape)}; experts have three sizes")
                weights |= {published.format(index): part for index, part in enumerate(tensor.split_experts())}
                continue
            weights[published] = tensor
            if self.architecture in PERMUTED and match[2] in ("attn_q", "attn_k"):
                heads = self.read_number("attention.head_count")
                tensor.heads = heads if match[2] == "attn_q" else self.read_number("attention.head_count_kv", heads)
                if len(tensor.blocks) % (2 * tensor.heads) or len(tensor.shape) != 2:
                    raise CheckpointError(f"{self.path!r}: {name} is {list(tensor.shape)}, not of {tensor.heads} heads")
        for tensor in weights.values():
            tensor.dtype = dtype
        return weights

    def weight_headers(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(tensor.shape, "float32") for name, tensor in self.weights(torch.float32).items()}

    def build_config(self) -> dict[str, Any]:
        """The config.json of a masked model's published checkpoint. Raises CheckpointError for a missing field."""
        if "token_embd.weight" not in self.tensors:
            raise CheckpointError(f"{self.path!r} holds no token_embd.weight")
        number, fields, config = self.read_number, self.fields, dict[str, Any]()
        width, heads = number("embedding_length"), number("attention.head_count")
        layers, kv_heads = number("block_count"), number("attention.head_count_kv", heads)
        length, vocab = number("context_length"), self.tensors["token_embd.weight"].shape[0]
        is_tied, head_dim = "output.weight" not in self.tensors, number("attention.key_length", width // heads)
        if self.architecture == "llada":
            config |= {
                **{"model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": width, "n_layers": layers},
                **{"n_heads": heads, "n_kv_heads": kv_heads, "mlp_hidden_size": number("feed_forward_length")},
                **{"vocab_size": vocab, "embedding_size": vocab, "max_sequence_length": length},
                **{"block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True},
                **{"layer_norm_with_affine": True, "include_bias": False, "weight_tying": is_tied},
            }
            if head_dim * heads != width:
                raise CheckpointError(f"{self.path!r}: llada.attention.key_length={head_dim} must be {width // heads}")
        else:
            config |= {
                **{"hidden_act": "silu", "hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocab},
                **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": length},
                **{"tie_word_embeddings": is_tied, "head_dim": head_dim},
            }
        if self.architecture == "dream":
            config |= {"model_type": "Dream", "architectures": ["DreamModel"]}
            config["intermediate_size"] = number("feed_forward_length")
        if self.architecture in ("llada-moe", "rnd1"):
            inner = number("expert_feed_forward_length")
            config |= {"num_experts": number("expert_count"), "num_experts_per_tok": number("expert_used_count")}
            if self.architecture == "rnd1":
                config |= {"model_type": "rnd1", "architectures": ["RND1LM"], "norm_topk_prob": True}
                config |= {"moe_intermediate_size": inner, "intermediate_size": number("feed_forward_length", inner)}
            else:
                config |= {"model_type": "llada", "architectures": ["LLaDAMoEModel"], "qk_layernorm": True}
                config["expert_intermediate_size"] = inner
        config["rms_norm_eps"] = number("attention.layer_norm_rms_epsilon")
        config["rope_theta"] = float(number("rope.freq_base", 10000.0))
        kind = fields.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind != "none":
            config["rope_scaling"] = {"rope_type": kind, "factor": float(number("rope.scaling.factor"))}
            if kind == "yarn":
                original = number("rope.scaling.original_context_length")
                config["rope_scaling"]["original_max_position_embeddings"] = original
        ids = {"mask_token_id": "mask", "eos_token_id": "eos", "pad_token_id": "padding", "bos_token_id": "bos"}
        config |= {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
        shift = fields.get("diffusion.shift_logits")
        if shift is not None and shift != (self.architecture in ("dream", "rnd1")):
            config[SHIFT] = shift
        return config

    def build_tokenizer(self) -> Any:
        """The byte-level tokenizer of a masked model; None where the file has no tokens. Raises CheckpointError for
        another kind, or an unknown rule that splits text."""
        fields = {key.removeprefix("tokenizer.ggml."): value for key, value in self.fields.items()}
        tokens, model, pre = (fields.get(name) for name in ("tokens", "model", "pre"))
        if tokens is None or model in (None, "none", "no_vocab"):
            return None
        if model != "gpt2" or pre not in SPLITS:
            raise CheckpointError(
                f"{self.path!r}: tokenizer.ggml.model={shown(model)} with tokenizer.ggml.pre={shown(pre)} is not "
                f"supported; supported: 'gpt2' with {', '.join(map(repr, SPLITS))}"
            )
        with checkpoint_errors(f"the tokenizer of {self.path!r} cannot be read", Exception):
            return self._build_byte_level(fields, tokens, SPLITS[pre], pre)
        return None

    def _build_byte_level(self, fields: Mapping[str, Any], tokens: list[str], split: str | None, pre: str) -> Any:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        types = [int(kind) for kind in fields.get("token_type", [1] * len(tokens))]
        vocabulary = {
            token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED
        }
        merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", [])]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        splits = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        for kind in (CONTROL, USER_DEFINED):
            texts = [token for token, token_type in zip(tokens, types, strict=True) if token_type == kind]
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=kind == CONTROL) for text in texts])
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
        ids = {name: fields.get(f"{key}_token_id") for name, key in names.items()}
        special = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
        # llama.cpp's converter sets the flag for every LLaDA, whose published tokenizer adds no token
        if fields.get("add_bos_token") and "bos_token" in special and self.architecture != "llada":
            bos = special["bos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, ids["bos"])]
            )
        template = fields.get("tokenizer.chat_template")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


# ---- the header -----------------------------------------------------------------------------------------------------


def read_gguf(source: str, gguf_file: str, revision: str | None) -> GgufFile:
    """The header of a file in a folder or repository. Raises CheckpointError, with the file's name, for one that is
    missing, cut short or damaged, or has a tensor of an unknown kind."""
    path = fetch(source, gguf_file, revision)
    if path is None:
        raise CheckpointError(f"{source!r} has no {gguf_file}")
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{gguf_file} of {source!r} is read with the package gguf: install paradec's extra 'gguf', e.g. pip "
            "install -e '.[gguf]'"
        )
    with checkpoint_errors(f"{str(path)!r} cannot be read as a GGUF file", OSError, ValueError):
        return _Reader(path).read()


class _Reader:
    """Reads a header from its beginning. Raises ValueError for a wrong one."""

    def __init__(self, path: Path):
        if path.stat().st_size < 24:
            raise ValueError("it is shorter than a header")
        self.path, self.data, self.offset = path, np.memmap(path, np.uint8, "r"), 0

    def read(self) -> GgufFile:
        if bytes(self.take(4)) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}; versions 2 and 3 of little-endian files are read")
        num_tensors, num_fields = self.count("Q", "tensors"), self.count("Q", "fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self.text()
            if name in fields:
                raise ValueError(f"it has {shown(name)} twice")
            fields[name] = self.value(self.number("I"), name)
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str):
            raise ValueError("it has no 'general.architecture'")
        if fields.get("split.count", 1) != 1:
            raise ValueError(f"it is one of {fields['split.count']} parts; merge them with llama-gguf-split --merge")
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment={shown(alignment)} must be a positive integer")
        start = -(-self.offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ValueError(f"it has the tensor {shown(name)} twice")
            tensors[name] = self.tensor(name, shape, kind, start + offset)
        return GgufFile(str(self.path), architecture, fields, tensors)

    def take(self, size: int) -> Any:
        if size > len(self.data) - self.offset:
            raise ValueError(f"it is cut short: its header goes on after its {len(self.data):,} bytes")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def count(self, code: str, noun: str) -> int:
        count = int(self.number(code))
        if count > MAX_ENTRIES:
            raise ValueError(f"it promises {count:,} {noun}, more than the {MAX_ENTRIES:,} that are read")
        return count

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode()

    def value(self, kind: int, name: str) -> Any:
        """A number, a text, a list of texts, or an array of numbers."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        kind = self.number("I") if kind == ARRAY else kind
        if kind == TEXT:
            return [self.text() for _ in range(self.count("Q", f"texts in {shown(name)}"))]
        if kind not in SCALARS:
            raise ValueError(f"{shown(name)} has values of the unknown kind {kind}")
        item = np.dtype(SCALARS[kind]).newbyteorder("<")
        return self.take(self.number("Q") * item.itemsize).view(item)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_sizes = self.text(), self.number("I")
        if not 1 <= num_sizes <= 4:
            raise ValueError(f"the tensor {shown(name)} has {num_sizes} sizes; tensors have 1 to 4")
        shape = tuple(int(self.number("Q")) for _ in range(num_sizes))[::-1]
        return name, shape, int(self.number("I")), int(self.number("Q"))

    def tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(number)
            weights_per_block, block_bytes = GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            reason = f"the tensor {shown(name)} is of kind {number}, which the package gguf does not unpack"
            raise ValueError(reason) from None
        if min(shape) < 1 or shape[-1] % weights_per_block:
            raise ValueError(f"the tensor {shown(name)} of kind {kind.name} is {list(shape)}")
        rows, row_bytes = prod(shape[:-1]), shape[-1] // weights_per_block * block_bytes
        if start + rows * row_bytes > len(self.data):
            raise ValueError(
                f"it is cut short: {shown(name)} ends at byte {start + rows * row_bytes:,} of its {len(self.data):,}"
            )
        blocks = self.data[start : start + rows * row_bytes].reshape(rows, row_bytes)
        return GgufTensor(blocks, kind, shape)
