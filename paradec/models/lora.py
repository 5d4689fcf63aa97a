"""Low-rank adapters (LoRA, arXiv 2106.09685) in peft's format.

adapter_config.json selects matrices by the published checkpoint's names or by patterns of them. Therefore peft adapts a
module of empty linear layers with these names. A family's `key_mapping` maps them to the names of the model's weights.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import check_bool, check_int, check_number, short_repr
from paradec.models.checkpoint import (
    CheckpointError,
    StoredTensor,
    check_fit,
    check_supported,
    checkpoint_errors,
    fetch,
    format_problems,
    read_json,
    rename_weight,
)
from paradec.models.weights import read_weights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft's prefix of the base model's names."""
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Fields of adapter_config.json that change the result -> their values for a plain product of two matrices. (Other
initialisations also change the base's weights.)"""
FIELDS = (
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
)
"""Fields that are passed to peft; other fields matter only in training."""


@dataclass(frozen=True)
class LoRA:
    """An adapter in memory.

    source: the folder or hub repository. file: its adapter_model.safetensors; adapter_config.json is next to it.
    config: peft's LoraConfig.
    weights: "NAME.lora_A.weight" [rank, in] and "NAME.lora_B.weight" [out, rank] for matrices NAME of the base."""

    source: str
    file: Path
    config: Any
    weights: Mapping[str, Tensor]

    def layers(self, base: str, headers: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Build peft's layers for the adapted matrices of the checkpoint `base`. Returns them by the matrices'
        published names without ".weight". Matrices of the adapter that its config does not select are left out with a
        warning, as in peft. Raises CheckpointError for an adapter that does not fit.

        headers: of the checkpoint's weights."""
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        matrix_names = dict.fromkeys(key.rpartition(".lora_")[0] for key in self.weights)
        shapes = {name.removesuffix(".weight"): e.shape for name, e in headers.items() if name.endswith(".weight")}
        if unknown := [name for name in matrix_names if len(shapes.get(name, ())) != 2]:
            raise CheckpointError(
                f"the adapter {self.source!r} does not fit {base!r}: {format_problems({'unexpected': unknown})}"
            )
        config = replace(self.config)
        if config.target_modules is None or str(config.target_modules).lower() == "all-linear":
            config.target_modules = set(matrix_names)  # peft resolves these only for transformers' modules
        try:
            with torch.device("meta"):
                module = _linear_layers({name: shape for name, shape in shapes.items() if len(shape) == 2})
                inject_adapter_in_model(config, module)
            layers = {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
            problem = ""
        except (re.error, RecursionError, OverflowError) as error:
            patterns = "target_modules, exclude_modules, layers_pattern, rank_pattern, alpha_pattern"
            raise CheckpointError(f"{CONFIG} of {self.source!r}: a pattern ({patterns}) is wrong: {error}") from error
        except ValueError as error:
            layers, problem = {}, f" ({error})"
        unused = [name for name in matrix_names if name not in layers]
        listing = f"{', '.join(unused[:4])}{f' and {len(unused) - 4} more' if len(unused) > 4 else ''}"
        if not layers:
            raise CheckpointError(
                f"{CONFIG} of {self.source!r}: target_modules, exclude_modules and layers_to_transform select none of "
                f"its matrices: {listing}{problem}"
            )
        parts = {f"{name}.lora_A.weight": layer.lora_A["default"] for name, layer in layers.items()}
        parts |= {f"{name}.lora_B.weight": layer.lora_B["default"] for name, layer in layers.items()}
        weights = {key: tensor for key, tensor in self.weights.items() if key.rpartition(".lora_")[0] in layers}
        expected = {key: part.weight for key, part in parts.items()}
        check_fit(expected, weights, self.source, f"{base!r} by its {CONFIG}")
        if unused:
            warnings.warn(f"{CONFIG} of {self.source!r} does not name {listing}: left out, as by peft", stacklevel=4)
        for key, tensor in weights.items():
            parts[key].weight = nn.Parameter(tensor, requires_grad=False)
        return layers

    @torch.no_grad()
    def merge(self, module: nn.Module, patterns: Mapping[str, str], layers: Mapping[str, Any]) -> None:
        """Add the products B A to the module's weights, in float32 at least, rounded once. Raises CheckpointError for a
        weight that is not in memory, or becomes infinite or NaN.

        patterns: the checkpoint's name patterns -> the module's names. layers: from the method `layers`."""
        parameters = dict(module.named_parameters())
        for name, layer in layers.items():
            weight = parameters[rename_weight(f"{name}.weight", patterns)]
            if weight.is_meta:
                raise CheckpointError(
                    f"the adapter {self.source!r} cannot be merged into {name}, which device_map has put on the disk"
                )
            wide_dtype = torch.promote_types(weight.dtype, torch.float32)
            layer.lora_A.to(weight.device, wide_dtype)
            layer.lora_B.to(weight.device, wide_dtype)
            weight.copy_(weight.to(wide_dtype) + layer.get_delta_weight("default"))
            if not weight.isfinite().all():
                raise CheckpointError(
                    f"{name} with the adapter {self.source!r} has values that are not finite: check the adapter's "
                    "matrices, lora_alpha and alpha_pattern"
                )


def read_base(source: str, revision: str | None) -> tuple[str, str | None]:
    """The base checkpoint in an adapter's config, and its revision. Raises CheckpointError if the config has none."""
    config = read_json(source, CONFIG, revision)
    base, base_revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{CONFIG} of {source!r} names no base_model_name_or_path; give load(base, adapter={source!r})"
        )
    if base_revision is not None and not isinstance(base_revision, str):
        raise CheckpointError(f"{CONFIG} of {source!r}: revision={short_repr(base_revision)} must be a text or null")
    return base, base_revision


def read_lora(source: str, revision: str | None = None, subfolder: str = "") -> LoRA:
    """Read an adapter from `source` or a subfolder of it. Raises CheckpointError for a missing or wrong file, or an
    adapter that is not a product of two matrices; ModuleNotFoundError without peft."""
    file = os.path.join(subfolder, CONFIG)
    if fetch(source, file, revision) is None:
        raise CheckpointError(f"adapter={source!r} has no {CONFIG}")
    config = _lora_config(source, read_json(source, file, revision))
    path = fetch(source, os.path.join(subfolder, WEIGHTS), revision)
    if path is None:
        raise CheckpointError(f"{source!r} has no {WEIGHTS}; pickled weights are not read")
    weights = {}
    for key, tensor in read_weights(path)[0].items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+\.lora_[AB])(?:\.default)?(\.weight)", key)
        if match is None:
            raise CheckpointError(f"the adapter {source!r} holds {key} {list(tensor.shape)}, not a LoRA matrix")
        weights[match[1] + match[2]] = tensor
    if not weights:
        raise CheckpointError(f"the adapter {source!r} holds no matrices")
    return LoRA(source, path, config, weights)


def _lora_config(source: str, config: Mapping[str, Any]) -> Any:
    try:
        from peft import LoraConfig
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"the LoRA adapter {source!r} needs peft: install paradec's extra 'lora', e.g. pip install -e '.[lora]'",
            name="peft",
        ) from None
    where = f"{CONFIG} of {source!r}"
    check_supported(config, SUPPORTED, where, ". Merge it with peft (merge_and_unload), save the result and load that")
    fields = {name: config[name] for name in FIELDS if config.get(name) is not None}
    with checkpoint_errors(where):
        _check_fields(fields)
        lora_config = LoraConfig(**fields)
    return lora_config


def _check_fields(fields: Mapping[str, Any]) -> None:
    check_rank, check_alpha = partial(check_int, low=1), partial(check_number, low=0, open_low=True)
    check_rank("r", fields.get("r"))
    check_alpha("lora_alpha", fields.get("lora_alpha"))
    check_bool("use_rslora", fields.get("use_rslora", False))
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = fields.get(name, [])
        if not isinstance(value, (str, list)) or not all(isinstance(text, str) and text for text in value):
            raise ValueError(f"{name}={short_repr(value)} must be a text or a list of texts")
        if isinstance(value, str) or name == "layers_pattern":
            _check_patterns(name, [value] if isinstance(value, str) else value)
    if not fields.get("target_modules", "all-linear"):
        value = short_repr(fields["target_modules"])
        raise ValueError(f"target_modules={value} must be names of matrices, a pattern of names or 'all-linear'")
    layers = fields.get("layers_to_transform", [])
    for index in layers if isinstance(layers, list) else [layers]:
        check_int("layers_to_transform", index)
    for name, check in (("rank_pattern", check_rank), ("alpha_pattern", check_alpha)):
        value = fields.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{name}={short_repr(value)} must be an object of patterns and numbers")
        _check_patterns(name, value)
        for text, number in value.items():
            check(f"{name}[{short_repr(text)}]", number)


def _check_patterns(name: str, patterns: Iterable[str]) -> None:
    for text in patterns:
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{name}={short_repr(text)} must be a regular expression: {error}") from None


def _linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    root = nn.Module()
    for name, (rows, columns) in shapes.items():
        parent = root
        *path, layer_name = name.split(".")
        for child in path:
            if not hasattr(parent, child):
                parent.add_module(child, nn.Module())
            parent = parent.get_submodule(child)
        parent.add_module(layer_name, nn.Linear(columns, rows, bias=False))
    return root
