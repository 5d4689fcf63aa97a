"""Plain causal language models: folders and hub repositories in transformers' own format, and GGUF files.

What `load` reads where config.json names a class of transformers that predicts the next token, and nothing that speaks
of masks. The module is transformers' own, and it ends and pads as its own `generate` does.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch

from paradec.core.checks import shown
from paradec.models import gguf_file as gguf
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError, check_foreign_dtypes, fetch, states_quantiser, stored_weights
from paradec.models.mtp import mtp_names
from paradec.models.pretrained import read_module, reason
from paradec.models.wrapping import CAUSAL_HEADS, default_attention, generation_ids, wrap

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
COMPUTED = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""How the names of stored tensors end that older releases wrote and modules compute for themselves."""


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether config.json is that of a class of transformers which predicts the next token, by its `model_type`."""
    return _class_name(config) is not None and config.get("is_causal") is not False


def load_causal(
    source: str,
    config: Mapping[str, Any],
    revision: str | None,
    attn_implementation: str,
    device: torch.device | None,
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | str = "auto",
    **options: Any,
) -> Model:
    """What `load` does for causal language models.

    Args:
        source: a folder or hub repository.
        config: config.json; {} for a GGUF file, which has one inside.
        gguf_file: the GGUF file in `source`. Its weights become plain numbers, float32 unless `dtype` says otherwise.
        options: for `from_pretrained`.

    Raises:
        CheckpointError: files that are missing, wrong, or of another kind of model.
    """
    for name in ("mask_token_id", "block_length", "topology", "rope_theta", "adapter"):
        if (value := options.pop(name, None)) is not None:
            value = getattr(value, "source", value)
            raise CheckpointError(f"{name}={value} is for masked models; {source!r} holds a causal language model")
    default_attention(attn_implementation, source, "causal")
    if fetch(source, "adapter_config.json", revision) is not None:
        raise CheckpointError(f"{source!r} holds an adapter_config.json; merge the adapter into its base model first")
    files: dict[str, Any] = {"revision": revision}
    if gguf_file is not None:
        gguf.check_file(source, gguf_file, revision)
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"{gguf_file} of {source!r} is read with the package gguf: pip install gguf")
        files["gguf_file"] = gguf_file
        dtype = torch.float32 if dtype == "auto" else dtype
    hf_config = _config(source, files)
    config = hf_config.to_dict() if gguf_file is not None else config
    cls = _class(source, config)
    stored: dict[str, Any] = {}
    if gguf_file is None:
        states_quantiser(source, config)
        stored = stored_weights(source, revision)
        check_foreign_dtypes(source, config, revision)
    if dtype == torch.float64:  # their kernels have no float64
        hf_config._experts_implementation = "eager"
    if attn_implementation.removeprefix("paradec_") == "eager":
        options["attn_implementation"] = "eager"
    heads = mtp_names(stored, config).prefixes
    module = _module(source, cls, hf_config, files, dtype=dtype, beside=heads, **options)
    if gguf_file is not None:
        _forget_file(module)
    if device is not None:
        module = module.to(device)
    tokenizer = _tokenizer(source, files)
    ends, pad = generation_ids(module, tokenizer)
    try:
        model = wrap(
            module,
            prediction="shifted",
            topology="causal",
            eos_token_id=ends,
            pad_token_id=pad,
            tokenizer=tokenizer,
        )
    except ValueError as error:
        raise CheckpointError(f"{source!r}: {error}") from error
    name = os.path.basename(gguf_file or source.rstrip("/")) or source
    model.facts = dataclasses.replace(model.facts, name=name.removesuffix(gguf.ENDING))
    new = getattr(module.generation_config, "max_new_tokens", None)
    if isinstance(new, int) and new > 0:
        model.default_max_new_tokens = new
    return model


def _class_name(config: Mapping[str, Any]) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None


def _class(source: str, config: Mapping[str, Any]) -> Any:
    """The class of transformers for a config.json.

    Raises:
        CheckpointError: another one is stated, none is for next tokens, or masks are spoken of.
    """
    import transformers

    own = _class_name(config)
    if own is None or not own.endswith(CAUSAL_HEADS):
        raise CheckpointError(
            f"{source!r} has model_type={shown(config.get('model_type'))}, which is no causal language model of "
            "transformers; load it with transformers and give it to paradec.wrap"
        )
    stated = config.get("architectures") or [own]
    stated = stated[0] if isinstance(stated, list) else stated
    if not isinstance(stated, str) or stated.lower() != own.lower():
        known = isinstance(stated, str) and hasattr(transformers, stated)
        what = f"is not {own}, which predicts the next token" if known else "is no class of transformers"
        raise CheckpointError(
            f"config.json of {source!r}: model_type={config['model_type']!r} with architectures=[{shown(stated)}], "
            f"which {what}; load it with the code that it comes from and give it to paradec.wrap"
        )
    if config.get("mask_token_id") is not None:
        raise CheckpointError(
            f"config.json of {source!r}: mask_token_id={shown(config['mask_token_id'])} speaks of a masked model; load "
            "it with transformers and give it to paradec.wrap with the prediction and topology that it was trained for"
        )
    return getattr(transformers, own)


def _config(source: str, files: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the config of {source!r} cannot be read: {reason(error)}") from error


def _module(source: str, cls: Any, hf_config: Any, files: dict[str, Any], **options: Any) -> Any:
    """Load the weights; none may be missing or left over."""
    quantised = getattr(hf_config, "quantization_config", None) is not None or "quantization_config" in options
    try:
        return read_module(cls, source, config=hf_config, computed=COMPUTED, **files, **options).eval()
    except (ImportError, ValueError) as error:
        # of an import: what a device_map needs, say
        if isinstance(error, CheckpointError) or isinstance(error, ImportError) and not quantised:
            raise
        raise CheckpointError(f"the weights of {source!r} cannot be read: {reason(error)}") from error


def _forget_file(module: Any) -> None:
    """Take off a module of plain numbers that it came from a quantised file: else transformers would not save it."""
    if all(parameter.is_floating_point() for parameter in module.parameters()):
        for name in ("hf_quantizer", "is_quantized", "quantization_method"):
            module.__dict__.pop(name, None)
        module.config.__dict__.pop("quantization_config", None)


def _tokenizer(source: str, files: dict[str, Any]) -> Any:
    """The checkpoint's tokenizer, or None when it ships none."""
    if "gguf_file" not in files and not any(fetch(source, name, files["revision"]) for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **files)
    except Exception as error:  # the tokenizers library raises bare Exception for a corrupt file
        raise CheckpointError(f"the tokenizer of {source!r} cannot be read: {reason(error)}") from error
