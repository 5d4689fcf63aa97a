"""Calculation of a request's memory: weights, key/value store and logits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from paradec.caches.store import store_bytes
from paradec.core.checks import check_choice, check_int


@dataclass(frozen=True)
class RequestMemory:
    """Bytes that a request needs, over all devices."""

    weights: int
    store: int
    """Keys and values of all positions; 0 without a store."""
    logits: int
    """Logits of one step, in the model's dtype."""

    @property
    def total(self) -> int:
        return self.weights + self.store + self.logits


def request_memory(
    source: Any,
    rows: int,
    length: int,
    *,
    wanted: int | None = None,
    stores: bool = True,
    dtype: torch.dtype | None = None,
    store_dtype: torch.dtype | None = None,
    quantization: str | None = None,
) -> RequestMemory:
    """Calculate the bytes that decoding needs; no weights are read.

    Args:
        source: a loaded text model, or the folder of a checkpoint (only its config.json is read).
        rows: number of rows decoded together; with guidance, give twice as many. length: number of positions of a row.
        wanted: number of a row's positions whose logits a step reads; None is `length`.
        stores: whether keys and values are stored.
        dtype: of weights and logits; None is the model's, or config.json's (else bfloat16).
        store_dtype: of keys and values; None is `dtype`.
        quantization: "int8" counts the weights as `load(quantization="int8")` rounds them.

    Raises:
        CheckpointError: no config.json of a text model that `paradec.load` reads. ValueError: rows, length or wanted
            below 1, or an unknown quantization."""
    for name, value in (("rows", rows), ("length", length), ("wanted", wanted)):
        check_int(name, value, low=1, none=name == "wanted")
    if quantization is not None:
        check_choice("quantization", quantization, ("int8",))
    if isinstance(source, (str, os.PathLike)):
        config, module = _empty_module(os.fspath(source))
        dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    else:
        config, module = source.text_config, source.module
    stored_dtypes = {weight: dtype or weight.dtype for weight in module.parameters()}
    weights = sum(weight.numel() * weight_dtype.itemsize for weight, weight_dtype in stored_dtypes.items())
    dtype = dtype or next(iter(stored_dtypes.values()))
    if quantization is not None:
        weights += _int8_difference(module, dtype.itemsize)
    store = store_bytes(config, rows, length, store_dtype or dtype) if stores else 0
    return RequestMemory(weights, store, rows * (wanted or length) * config.vocab_size * dtype.itemsize)


def _int8_difference(module: Any, itemsize: int) -> int:
    """Change in bytes when weights of `itemsize` bytes become int8 with scales (negative if they shrink). A tied output
    matrix becomes a separate copy."""
    from paradec.models.int8 import Int8Config, is_converted

    difference, embeddings = 0, module.get_input_embeddings().weight
    for name, layer in module.named_modules():
        if is_converted(name, layer, Int8Config.min_weights):
            for weight in (weight for weight in layer.parameters(recurse=False) if weight.ndim > 1):
                old_size = 0 if weight is embeddings else itemsize
                difference += weight.numel() * (1 - old_size) + 4 * weight.numel() // weight.shape[-1]
    return difference


def _empty_module(folder: str) -> tuple[Any, torch.nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from paradec.models.causal import is_causal
    from paradec.models.checkpoint import CheckpointError, read_json
    from paradec.models.masked import known_family

    fields = read_json(folder, "config.json", None, required=True)
    family = known_family(fields)
    if family is None and not is_causal(fields):
        raise CheckpointError(
            f"{folder!r}: model_type={fields.get('model_type')!r} is not a text model of paradec.load"
        )
    config = AutoConfig.for_model(**fields) if family is None else family.config(fields)
    if isinstance(dtype_name := fields.get("dtype", fields.get("torch_dtype")), str):
        config.dtype = getattr(torch, dtype_name, None)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)
