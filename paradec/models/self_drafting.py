"""Causal models that make their own drafts, in a block of masks after causal keys and values; some use an adapter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import short_repr
from paradec.models.checkpoint import CheckpointError, StoredTensor, fetch, rename_weight
from paradec.models.family import Family
from paradec.models.lora import CONFIG, LoRA, read_lora


@dataclass(frozen=True)
class SelfDrafting:
    """Settings of a model that decodes token by token, and drafts by filling blocks of masks (`facts.mask_token_id`).

    block_length: the block length of the model's training; a block includes the last accepted token.
    adapter: applied while the model drafts; None if the model has none."""

    block_length: int
    adapter: DraftAdapter | None = None


@dataclass(frozen=True)
class DraftAdapter:
    """Products B A of low rank, added to linear layers while a call drafts, and never merged.

    files: its adapter_config.json and adapter_model.safetensors.
    products: names of the module's layers -> A [rank, in], B [out, rank] and their scale."""

    files: tuple[Path, Path]
    products: Mapping[str, tuple[Tensor, Tensor, float]]

    def save(self, folder: Path) -> None:
        """Copy `files` into a new folder."""
        folder.mkdir()
        for file in self.files:
            shutil.copyfile(file, folder / file.name)

    @contextmanager
    def apply_to(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which the module's layers add the products."""
        with ExitStack() as hooks:
            for name, product in self.products.items():
                handle = module.get_submodule(name).register_forward_hook(partial(_add_product, *product))
                hooks.callback(handle.remove)
            yield


def _add_product(down: Tensor, up: Tensor, scale: float, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    down_matrix, up_matrix = (part.to(output.device, output.dtype) for part in (down, up))
    return output + scale * torch.nn.functional.linear(torch.nn.functional.linear(inputs[0], down_matrix), up_matrix)


def select_mode(source: str, family: Family, topology: str | None) -> Family:
    """Restrict a family to one of its modes, by default the first. Raises CheckpointError for an unknown mode."""
    mode = family.topology if topology is None else topology
    if mode not in family.modes:
        modes = ", ".join(map(repr, family.modes))
        raise CheckpointError(f"topology={short_repr(topology)} does not fit {source!r}, which allows {modes}")
    prediction = "shifted" if mode == "causal" else family.prediction
    align = "absolute" if mode == "causal" else "prompt"
    return replace(family, modes=(mode,), prediction=prediction, block_align=align)


def read_self_drafting(
    source: str,
    family: Family,
    block_length: int | None,
    headers: Mapping[str, StoredTensor],
    revision: str | None,
    adapter: LoRA | None,
) -> SelfDrafting:
    """Read the settings for drafts. adapter: replaces the checkpoint's. Raises CheckpointError for a wrong adapter."""
    if adapter is None and family.draft_adapter is not None:
        if fetch(source, f"{family.draft_adapter}/{CONFIG}", revision) is not None:
            adapter = read_lora(source, revision, family.draft_adapter)
    draft_adapter = None
    if adapter is not None:
        products = {}
        for name, layer in adapter.layers(source, headers).items():
            module_name = rename_weight(f"{name}.weight", family.key_mapping or {}).removesuffix(".weight")
            down, up = (part["default"].weight.data for part in (layer.lora_A, layer.lora_B))
            products[module_name] = (down, up, layer.scaling["default"])
        draft_adapter = DraftAdapter((adapter.file.with_name(CONFIG), adapter.file), products)
    assert block_length is not None  # families with modes always have one
    return SelfDrafting(block_length, draft_adapter)
