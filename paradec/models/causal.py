"""Causal language models in transformers' format or in GGUF files, with the end and padding ids of `generate`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from paradec.core.checks import check_int, short_repr
from paradec.models.base import Model
from paradec.models.checkpoint import (
    CheckpointError,
    check_stored_dtypes,
    checkpoint_errors,
    fetch,
    is_quantised,
    read_module,
    read_weight_headers,
)
from paradec.models.gguf import CAUSAL as GGUF_CAUSAL
from paradec.models.gguf import MASKED as GGUF_MASKED
from paradec.models.gguf import ROPE_FACTORS, GgufFile
from paradec.models.wrapping import CAUSAL_HEADS, default_attention, generation_ids, wrap

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
COMPUTED = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Endings of the names of stored tensors that are not read, because modules compute them."""
GGUF_ENDING = ".gguf"


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a causal language model of transformers, by `model_type` and `is_causal`."""
    return _causal_class_name(config) is not None and config.get("is_causal") is not False


def load_causal(
    source: str,
    config: Mapping[str, Any],
    revision: str | None,
    attn_implementation: str,
    device: torch.device | None,
    *,
    gguf: GgufFile | None = None,
    dtype: torch.dtype | str = "auto",
    tokenizer: Any = None,
    **options: Any,
) -> Model:
    """Load a causal language model, as `load` does. Raises CheckpointError for files that are missing, wrong, or of
    another kind.

    config: config.json; {} for a GGUF file, whose header replaces it. gguf: the GGUF file in `source`.
    tokenizer: replaces the checkpoint's. options: for `from_pretrained`."""
    import transformers

    for name in ("mask_token_id", "block_length", "topology", "rope_theta", "adapter"):
        if (value := options.pop(name, None)) is not None:
            value = getattr(value, "source", value)
            raise CheckpointError(f"{name}={value} is for masked models; {source!r} holds a causal language model")
    default_attention(attn_implementation, source, "causal")
    if fetch(source, "adapter_config.json", revision) is not None:
        raise CheckpointError(f"{source!r} holds an adapter_config.json; merge the adapter into its base model first")
    file_options: dict[str, Any] = {"revision": revision}
    if gguf is not None:
        _check_architecture(gguf)
        file_options["gguf_file"] = os.path.basename(gguf.path)
    unreadable = (OSError, ValueError, KeyError, TypeError, AttributeError)
    with checkpoint_errors(f"the config of {source!r} cannot be read", *unreadable):
        hf_config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **file_options)
    config = hf_config.to_dict() if gguf is not None else config
    cls = _select_class(source, config)
    headers: dict[str, Any] = {}
    if gguf is None:
        is_quantised(source, config)  # raises an error for a quantisation that transformers does not know
        headers = read_weight_headers(source, revision)
        check_stored_dtypes(source, config, revision)
    if dtype == torch.float64:  # the kernels of experts have no float64
        hf_config._experts_implementation = "eager"
    if attn_implementation.removeprefix("paradec_") == "eager":
        options["attn_implementation"] = "eager"
    mtp_prefixes = find_mtp_weights(headers, config).prefixes
    if gguf is not None and gguf.architecture in GGUF_CAUSAL:
        options["state_dict"] = gguf.read_weights(dtype)
        if ROPE_FACTORS in gguf.tensors:
            _scale_angles(gguf, hf_config)
    has_quantization = getattr(hf_config, "quantization_config", None) is not None or "quantization_config" in options
    options |= {"config": hf_config, "dtype": dtype, "computed": COMPUTED, "read_elsewhere": mtp_prefixes}
    # an ImportError without quantisation is about a device_map, not about the checkpoint
    error_types = (ImportError, ValueError) if has_quantization else (ValueError,)
    with checkpoint_errors(f"the weights of {source!r} cannot be read", *error_types):
        module = read_module(cls, source, **file_options, **options).eval()
    if gguf is not None:
        # the weights of a quantised file have been unpacked: let transformers save them
        if all(parameter.is_floating_point() for parameter in module.parameters()):
            for name in ("hf_quantizer", "is_quantized", "quantization_method"):
                module.__dict__.pop(name, None)
            module.config.__dict__.pop("quantization_config", None)
    if device is not None:
        module = module.to(device)
    if tokenizer is None and (gguf is not None or any(fetch(source, name, revision) for name in TOKENIZER_FILES)):
        # the tokenizers library raises bare Exception for a corrupt file
        with checkpoint_errors(f"the tokenizer of {source!r} cannot be read", Exception):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **file_options)
    eos_ids, pad_id = generation_ids(module, tokenizer)
    ids: dict[str, Any] = {"eos_token_id": eos_ids, "pad_token_id": pad_id}
    with checkpoint_errors(repr(source)):
        model = wrap(module, prediction="shifted", topology="causal", **ids, tokenizer=tokenizer)
    name = os.path.basename(source.rstrip("/") if gguf is None else gguf.path) or source
    model.facts = dataclasses.replace(model.facts, name=name.removesuffix(GGUF_ENDING))
    max_new_tokens = getattr(module.generation_config, "max_new_tokens", None)
    if isinstance(max_new_tokens, int) and max_new_tokens > 0:
        model.default_max_new_tokens = max_new_tokens
    return model


def _causal_class_name(config: Mapping[str, Any]) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None


def _select_class(source: str, config: Mapping[str, Any]) -> Any:
    """The class of transformers for a config.json. Raises CheckpointError for an unknown class, or a masked model."""
    import transformers

    expected = _causal_class_name(config)
    if expected is None or not expected.endswith(CAUSAL_HEADS):
        raise CheckpointError(
            f"{source!r} has model_type={short_repr(config.get('model_type'))}, which is not a causal language model "
            "of transformers; load it with transformers and give it to paradec.wrap"
        )
    architecture = config.get("architectures") or [expected]
    architecture = architecture[0] if isinstance(architecture, list) else architecture
    if not isinstance(architecture, str) or architecture.lower() != expected.lower():
        is_known = isinstance(architecture, str) and hasattr(transformers, architecture)
        problem = f"is not {expected}, which predicts the next token" if is_known else "is not a class of transformers"
        raise CheckpointError(
            f"config.json of {source!r}: model_type={config['model_type']!r} with "
            f"architectures=[{short_repr(architecture)}], which {problem}; load it with the code that it comes from "
            "and give it to paradec.wrap"
        )
    if config.get("mask_token_id") is not None:
        raise CheckpointError(
            f"config.json of {source!r}: mask_token_id={short_repr(config['mask_token_id'])} means a masked model; "
            "load it with transformers and give it to paradec.wrap with the prediction and topology of its training"
        )
    return getattr(transformers, expected)


# ---- GGUF files -----------------------------------------------------------------------------------------------------


def split_gguf_path(source: str, gguf_file: str | None) -> tuple[str, str | None]:
    """Split "folder/file.gguf" or "owner/repository/file.gguf" into the folder or repository, and the file. Other
    sources are returned with `gguf_file`. Raises CheckpointError for a wrong ending or two files."""
    if gguf_file is not None and (not isinstance(gguf_file, str) or not gguf_file.endswith(GGUF_ENDING)):
        raise CheckpointError(
            f"gguf_file={short_repr(gguf_file)} must be the name of a file that ends in {GGUF_ENDING!r}"
        )
    if not source.endswith(GGUF_ENDING) or os.path.isdir(source):
        return source, gguf_file
    if gguf_file is not None:
        raise CheckpointError(f"source={short_repr(source)} names a GGUF file, and gguf_file={gguf_file!r} another")
    if os.path.exists(source) or source.count("/") < 2 or source.startswith((".", "/", "~")):
        folder, name = os.path.split(source)
        return folder or ".", name
    owner, repository, name = source.split("/", 2)
    return f"{owner}/{repository}", name


def _check_architecture(gguf: GgufFile) -> None:
    """Raise CheckpointError unless transformers reads files of this architecture."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    supported = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    known = {re.sub("[-_]", "", name) for name in supported}  # "qwen2moe", "qwen2_moe"
    if re.sub("[-_]", "", gguf.architecture) not in known:
        raise CheckpointError(
            f"{gguf.path!r} holds {gguf.architecture!r}, which load cannot read from GGUF; it reads "
            f"{', '.join((*GGUF_MASKED, *supported))}"
        )


def _scale_angles(gguf: GgufFile, config: Any) -> None:
    """Set the scaling of the rotary angles in `config`, since transformers does not read the factors in the file.
    Raises CheckpointError unless the factors are those of Llama 3.1 and later releases."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors, theta = gguf.tensors[ROPE_FACTORS][...], config.rope_parameters["rope_theta"]
    lengths = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": "llama3", "rope_theta": theta, "factor": round(float(factors.max()), 3), **lengths}
    config.rope_parameters = scaling
    angles, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    expected = theta ** (-torch.arange(len(angles)) / len(angles)) / angles
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(f"{gguf.path!r} holds {ROPE_FACTORS}, which are not the factors of {scaling}")


# ---- heads for multi-token prediction, which `load_drafter` reads ---------------------------------------------------

MTP_NAME = re.compile(
    r"(?:model\.)?(?:layers\.(?P<layer>\d+)|mtp_layers\.(?P<mtp_layer>\d+)|mtp(?:\.layers\.(?P<mtp_inner>\d+))?)\."
)
"""Prefix of the names of a head's weights. Heads continue the numbers of the model's layers (DeepSeek-V3, GLM-4 MoE),
have their own numbers (MiMo, speculators), or are parts of `mtp` (Qwen3-Next, Mellum)."""
MTP_PARTS = {
    **{"enorm": "enorm", "pre_fc_norm_embedding": "enorm", "token_layernorm": "enorm"},
    **{"hnorm": "hnorm", "pre_fc_norm_hidden": "hnorm", "hidden_layernorm": "hnorm"},
    **{"eh_proj": "eh_proj", "fc": "eh_proj", "input_proj": "eh_proj"},
    **{"shared_head.norm": "norm", "norm": "norm", "final_layernorm": "norm"},
}
"""Parts of a head besides its decoder layer: published names -> names in `paradec.models.mtp`."""
MTP_SHARED = ("embed_tokens", "shared_head.head")
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields of config.json for the number of heads."""


class MtpWeights(NamedTuple):
    module_names: dict[str, str]
    """The checkpoint's names -> names in `paradec.models.mtp`."""
    prefixes: tuple[str, ...]
    """Prefixes of the names of all tensors of heads, including copies of the model's weights."""


def find_mtp_weights(names: Collection[str], config: Mapping[str, Any]) -> MtpWeights:
    """Find the weights of heads by name. A layer after the model's layers is a head if it is within config.json's
    number of heads and has `eh_proj`."""
    num_layers, count = config.get("num_hidden_layers"), count_mtp_layers(config)
    module_names, prefixes = {}, set()
    for name in names:
        match = MTP_NAME.match(name)
        if match is None:
            continue
        index = int(match["mtp_layer"] or match["mtp_inner"] or 0)
        if match["layer"] is not None:
            if not isinstance(num_layers, int) or not 0 <= int(match["layer"]) - num_layers < count:
                continue
            if f"{match.group()}eh_proj.weight" not in names:
                continue
            index = int(match["layer"]) - num_layers
        prefixes.add(match.group())
        part, _, parameter_name = name[match.end() :].rpartition(".")
        if part not in MTP_SHARED:
            is_in_block = part not in MTP_PARTS or match["mtp_inner"] is not None
            target = f"block.{part}" if is_in_block else MTP_PARTS[part]
            module_names[name] = f"layers.{index}.{target}.{parameter_name}"
    return MtpWeights(module_names, tuple(sorted(prefixes)))


def count_mtp_layers(config: Mapping[str, Any]) -> int:
    """The number of heads in config.json, 0 if it has no such field. Raises CheckpointError for an invalid number."""
    name = next((name for name in MTP_COUNTS if config.get(name) is not None), "")
    value = config.get(name, 0)
    with checkpoint_errors("config.json"):
        check_int(name, value, low=0)
    return value
