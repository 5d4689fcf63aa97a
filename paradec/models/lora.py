"""Low-rank adapters (LoRA, arXiv 2106.09685) in peft's format, merged into a checkpoint's weights when it is loaded.

A folder has adapter_config.json and adapter_model.safetensors; the latter holds, for each matrix W that is adapted, A
[r, in] and B [out, r] under the base model's own names. Merged, it is W + alpha / r * B A (alpha / sqrt(r) with
`use_rslora`).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paradec.core.checks import shown
from paradec.models.checkpoint import CheckpointError, Stored, fetch, listed, published_to_own, read_json
from paradec.models.lora_config import CONFIG, AdapterConfig, read_config
from paradec.models.weights import read_weights

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the base model's names."""


@dataclass(frozen=True)
class LoRA:
    """An adapter that has been read.

    Args:
        config: its adapter_config.json.
        pairs: the base's names of the adapted matrices, without ".weight" -> A [r, in] and B [out, r].
    """

    config: AdapterConfig
    pairs: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def source(self) -> str:
        """The folder or hub repository."""
        return self.config.source

    def scales(self, base: str, stored: Mapping[str, Stored]) -> dict[str, float]:
        """The adapted matrices of the checkpoint `base`, which holds `stored`, and what their products are multiplied
        with. Products that the config does not name are left out, as by peft, but with a warning.

        Raises:
            CheckpointError: the adapter is none of this checkpoint: a matrix that the config names has no product, or
                one does not fit.
        """
        matrices = [name.removesuffix(".weight") for name, entry in stored.items() if len(entry.shape) == 2]
        named = self.config.products(name for name in matrices if f"{name}.weight" in stored)
        wrong: dict[str, list[str]] = {"missing": [], "unexpected": [], "mismatched": []}
        if self.config.targets is not None:
            wrong["missing"] = [name for name in named if name not in self.pairs]
        for name, (down, up) in self.pairs.items():
            there = stored.get(f"{name}.weight")
            if there is None:
                wrong["unexpected"].append(name)
            elif (up.shape[0], down.shape[1]) != there.shape:
                wrong["mismatched"].append(f"{name} {[up.shape[0], down.shape[1]]} instead of {list(there.shape)}")
        if any(wrong.values()):
            why = "; target_modules names what is missing" if wrong["missing"] else ""
            raise CheckpointError(f"the adapter {self.source!r} does not fit {base!r}: {listed(wrong)}{why}")
        found = {name: named[name] for name in self.pairs if name in named}
        for name, product in found.items():
            down, up = self.pairs[name]
            if (len(down), up.shape[1]) != (product.rank, product.rank):
                raise CheckpointError(
                    f"the adapter {self.source!r} holds matrices of rank {len(down)} and {up.shape[1]} for {name}; "
                    f"by r and rank_pattern of its {CONFIG} it is {product.rank}"
                )
        if others := [name for name in self.pairs if name not in named]:
            what = f"{', '.join(others[:4])}{f' and {len(others) - 4} more' if len(others) > 4 else ''}"
            if not found:
                raise CheckpointError(
                    f"{CONFIG} of {self.source!r}: target_modules, exclude_modules and layers_to_transform leave "
                    f"nothing of what it holds: {what}"
                )
            warnings.warn(f"{CONFIG} of {self.source!r} does not name {what}: left out, as by peft", stacklevel=4)
        return {name: product.scale for name, product in found.items()}

    @torch.no_grad()
    def merge(self, module: nn.Module, names: Mapping[str, str], scales: Mapping[str, float]) -> None:
        """Add the products to the module's weights, in float32 at least, rounded once.

        Args:
            names: the checkpoint's name patterns -> the module's names. scales: as `scales` gives them.

        Raises:
            CheckpointError: a weight that is not in memory here, or one that is not finite then.
        """
        parameters = dict(module.named_parameters())
        for name, scale in scales.items():
            weight = parameters[published_to_own(f"{name}.weight", names)]
            if weight.is_meta:
                raise CheckpointError(
                    f"the adapter {self.source!r} cannot be merged into {name}, which device_map has put on the disk"
                )
            down, up = self.pairs[name]
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = up.to(weight.device, wide) @ down.to(weight.device, wide)
            weight.copy_(weight.to(wide) + scale * product)
            if not weight.isfinite().all():
                raise CheckpointError(
                    f"{name} with the adapter {self.source!r} holds numbers that are not finite, by its matrices, "
                    "lora_alpha or alpha_pattern"
                )


def base_of(source: str, revision: str | None) -> tuple[str, str | None]:
    """The checkpoint that an adapter says it is for, and its revision.

    Raises:
        CheckpointError: it names none.
    """
    config = read_json(source, CONFIG, revision)
    base, of_base = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{CONFIG} of {source!r} names no base_model_name_or_path; give load(base, adapter={source!r})"
        )
    if of_base is not None and not isinstance(of_base, str):
        raise CheckpointError(f"{CONFIG} of {source!r}: revision={shown(of_base)} must be a text or null")
    return base, of_base


def read_lora(source: str, revision: str | None = None, inside: str = "") -> LoRA:
    """Read an adapter.

    Args:
        inside: the folder of the source that it is in.

    Raises:
        CheckpointError: a file that is missing or wrong, or an adapter that is more than a product of two matrices.
    """
    config = read_config(source, revision, inside)
    path = fetch(source, os.path.join(inside, WEIGHTS), revision)
    if path is None:
        raise CheckpointError(f"{source!r} has no {WEIGHTS}; pickled weights are not read")
    return LoRA(config, _pairs(source, path))


def _pairs(source: str, path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Both matrices of every product, by the base's name."""
    halves: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for key, tensor in read_weights(path)[0].items():
        found = re.fullmatch(r"(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if found is None or not key.startswith(PREFIX) or tensor.ndim != 2:
            raise CheckpointError(f"the adapter {source!r} holds {key} {list(tensor.shape)}, which is no LoRA matrix")
        halves[found.group(2)][found.group(1).removeprefix(PREFIX)] = tensor
    down, up = halves["A"], halves["B"]
    if alone := sorted(down.keys() ^ up.keys()):
        raise CheckpointError(f"the adapter {source!r} holds one of two matrices only for {', '.join(alone[:4])}")
    if not down:
        raise CheckpointError(f"the adapter {source!r} holds no matrices")
    return {name: (down[name], up[name]) for name in down}
