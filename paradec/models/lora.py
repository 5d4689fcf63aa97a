"""Low-rank adapters (LoRA, arXiv 2106.09685) in peft's format, merged into a checkpoint's weights when it is loaded.

A folder has adapter_config.json and adapter_model.safetensors; the latter holds, for each matrix W that is adapted, A
[r, in] and B [out, r] under the base model's own names. Merged, it is W + alpha / r * B A (alpha / sqrt(r) with
`use_rslora`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paradec.checks import is_finite, shown
from paradec.models.checkpoint import CheckpointError, Stored, fetch, listed, published_to_own, read_json
from paradec.models.weights import read_weights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the base model's names."""
ONLY: Mapping[str, tuple[Any, ...]] = {
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
"""Fields of adapter_config.json that change what is computed, and the values that are a plain product of two matrices.
(Other initialisations change the base's weights too.)"""


@dataclass(frozen=True)
class LoRA:
    """An adapter that has been read.

    Args:
        source: the folder or hub repository. config: its adapter_config.json.
        pairs: the base's names of the adapted matrices, without ".weight" -> A [r, in] and B [out, r].
    """

    source: str
    config: Mapping[str, Any]
    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def scale(self, name: str) -> float:
        """What the product for a matrix is multiplied with."""
        rank = len(self.pairs[name][0])
        alpha = float(_of_pattern(self.config, "alpha_pattern", name, self.config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def check(self, base: str, stored: Mapping[str, Stored]) -> None:
        """Raise CheckpointError unless the adapter is one of the checkpoint `base`, which holds `stored`: every matrix
        that `target_modules` names has its product, and each fits."""
        missing = [name for name in self._targets(stored) if name not in self.pairs]
        unexpected, mismatched = [], []
        for name, (down, up) in self.pairs.items():
            there = stored.get(f"{name}.weight")
            if there is None:
                unexpected.append(name)
            elif (up.shape[0], down.shape[1]) != there.shape:
                mismatched.append(f"{name} {[up.shape[0], down.shape[1]]} instead of {list(there.shape)}")
        wrong = {"missing": missing, "unexpected": unexpected, "mismatched": mismatched}
        if any(wrong.values()):
            raise CheckpointError(f"the adapter {self.source!r} does not fit {base!r}: {listed(wrong)}")

    def _targets(self, stored: Mapping[str, Stored]) -> list[str]:
        """The matrices that the config names; none where it names only some of the layers, or all that are linear."""
        targets = self.config.get("target_modules")
        if self.config.get("layers_to_transform") is not None or targets in (None, "all-linear"):
            return []
        excluded = self.config.get("exclude_modules")
        found = []
        for weight, entry in stored.items():
            name = weight.removesuffix(".weight")
            if weight != name and len(entry.shape) == 2 and _named(targets, name) and not _named(excluded, name):
                found.append(name)
        return found

    @torch.no_grad()
    def merge(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Add the products to the module's weights, in float32 at least, rounded once.

        Args:
            names: the checkpoint's name patterns -> the module's names.

        Raises:
            CheckpointError: a weight that is not in memory here.
        """
        parameters = dict(module.named_parameters())
        for name, (down, up) in self.pairs.items():
            weight = parameters[published_to_own(f"{name}.weight", names)]
            if weight.is_meta:
                raise CheckpointError(
                    f"the adapter {self.source!r} cannot be merged into {name}, which device_map has put on the disk"
                )
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = up.to(weight.device, wide) @ down.to(weight.device, wide)
            weight.copy_(weight.to(wide) + self.scale(name) * product)


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
    return base, of_base if isinstance(of_base, str) else None


def read_lora(source: str, revision: str | None = None) -> LoRA:
    """Read an adapter.

    Raises:
        CheckpointError: a file that is missing or wrong, or an adapter that is more than a product of two matrices.
    """
    if fetch(source, CONFIG, revision) is None:
        raise CheckpointError(f"adapter={source!r} has no {CONFIG}")
    config = read_json(source, CONFIG, revision)
    for name, allowed in ONLY.items():
        value = config.get(name, allowed[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise CheckpointError(
                f"{CONFIG} of {source!r}: {name}={shown(value)} is not supported; supported: "
                f"{', '.join(map(repr, allowed))}. Merge it with peft (merge_and_unload) and load what that saves"
            )
    for name, kind in (("lora_alpha", (int, float)), ("r", (int,))):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, kind) or not is_finite(value) or value <= 0:
            raise CheckpointError(f"{CONFIG} of {source!r}: {name}={shown(value)} must be a number above 0")
    path = fetch(source, WEIGHTS, revision)
    if path is None:
        raise CheckpointError(f"{source!r} has no {WEIGHTS}; pickled weights are not read")
    return LoRA(source, config, _pairs(source, path, config))


def _pairs(source: str, path: Path, config: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
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
    for name in down:
        rank = _of_pattern(config, "rank_pattern", name, config["r"])
        if (len(down[name]), up[name].shape[1]) != (rank, rank):
            raise CheckpointError(
                f"the adapter {source!r} holds matrices of rank {len(down[name])} and {up[name].shape[1]} for {name}; "
                f"its {CONFIG} says {rank}"
            )
    return {name: (down[name], up[name]) for name in down}


def _of_pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """What a field of patterns says of a matrix, by the first that its name ends with."""
    patterns = config.get(field) or {}
    return next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name)), default)


def _named(targets: Any, name: str) -> bool:
    """Whether `target_modules` means a matrix: a pattern of whole names, or a list of how they end."""
    if not targets:
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in targets)
