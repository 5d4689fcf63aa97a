"""`paradec.load_drafter`: selection of a drafter's format."""

from __future__ import annotations

import os
from typing import Any

import torch

from paradec.core.checks import check_choice, short_repr
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError, check_path, fetch, read_json
from paradec.models.dflash import TRANSFORMERS_TYPE, DFlashDrafter, load_dflash, network_classes
from paradec.models.drafter import TABLES, check_base
from paradec.models.eagle import EagleDrafter, load_eagle
from paradec.models.eagle3 import Eagle3Drafter, load_eagle3
from paradec.models.mtp import MtpDrafter, load_mtp
from paradec.models.weights import read_weights

FILES = ("model.safetensors", "pytorch_model.bin")
FORMATS = {"eagle3": "EAGLE-3", "dflash2": "DFlash 2", "dspark": "DSpark", "mtp": "MTP"}
"""speculators' `speculators_model_type` -> name of the format."""
ARCHITECTURES = {"DFlash2DraftModel": "dflash2", "Qwen3DSparkModel": "dspark"}
"""Formats of z-lab and DeepSpec by the class in config.json."""
EAGLE3_PREFIXES = ("midlayer.", "layers.0.hidden_norm.", *TABLES)
UNUSED = "rotary_emb.inv_freq"
"""Ending of the name of an unused tensor in old checkpoints."""
NO_WEIGHTS = r"rotary_emb\.inv_freq$|^(model\.)?(d2t|t2d)"
"""Pattern of the names of tensors that are not weights; these may hold integers."""


def load_drafter(
    source: str | os.PathLike[str] | Model,
    *,
    base: Model | None = None,
    kind: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> EagleDrafter | Eagle3Drafter | DFlashDrafter | MtpDrafter:
    """Read a drafter from a folder or hub repository in its published format: EAGLE, EAGLE-2, LANTERN, EAGLE-3 and 3.1
    (the paper's or speculators' format), DFlash (z-lab's or transformers'), DFlash 2 (z-lab's or speculators') or
    DSpark (DeepSpec's or speculators'). DFlash and later formats need safetensors, and transformers 5.23 or newer.

    Heads for multi-token prediction (MTP) are in the checkpoint of the model that was trained with them (DeepSeek-V3,
    GLM-4 MoE and others): `load_drafter(model, kind="mtp")`. In speculators' format they have a separate folder.

    Args:
        source: the folder or repository; for MTP a model from `paradec.load`, or the folder of its checkpoint.
        base: the model that the drafter was trained for: a causal transformers decoder (loaded or wrapped), a LlamaGen,
            or an image model on a Llama-like backbone.
        kind: "mtp" reads the heads of a model's own checkpoint; None reads a drafter's folder.
        dtype: of the parameters; the base's by default. The device is the base's.
        revision: of a hub repository.

    Raises: CheckpointError (a ValueError): files that are missing or corrupt, weights that do not fit (the message
        names them), sizes that differ from the base's, or an unknown format. TypeError, ValueError: a base that the
        drafter cannot draft for."""
    if kind is not None:
        check_choice("kind", kind, ("mtp",))
    if kind is not None and base is None:
        base, source = source, _checkpoint_folder(source)  # type: ignore[assignment]
    check_base(base)
    assert base is not None
    check_path("source", source)
    source = os.fspath(source)  # type: ignore[arg-type]
    config = read_json(source, "config.json", revision, required=True)
    if kind is not None or config.get("speculators_model_type") == "mtp":
        return load_mtp(source, config, base, dtype, revision)
    format_name = config.get("speculators_model_type")
    if format_name is not None and (not isinstance(format_name, str) or format_name not in FORMATS):
        raise CheckpointError(
            f"{source!r}: speculators_model_type={short_repr(format_name)} is not supported; supported: "
            f"{', '.join(map(repr, FORMATS))}"
        )
    architectures = config.get("architectures")
    format_kind = format_name or next(
        (ARCHITECTURES[name] for name in ARCHITECTURES if isinstance(architectures, list) and name in architectures),
        None,
    )
    if format_kind in ("dflash2", "dspark"):
        network_classes(source)  # raises CheckpointError if transformers lacks them
        from paradec.models import dflash2, dspark

        load = dflash2.load_dflash2 if format_kind == "dflash2" else dspark.load_dspark
        return load(source, config, base, dtype, revision)
    if "dflash_config" in config or config.get("model_type") == TRANSFORMERS_TYPE:
        return load_dflash(source, config, base, dtype, revision)
    if str(config.get("model_type")).startswith("deepseek_v4"):
        raise CheckpointError(f"{source!r} is a DeepSeek-V4, whose built-in DSpark is not supported")
    path = next((candidate for name in FILES if (candidate := fetch(source, name, revision)) is not None), None)
    if path is None:
        raise CheckpointError(f"{source!r} has neither {' nor '.join(FILES)}")
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in read_weights(path, NO_WEIGHTS)[0].items()
        if not name.endswith(UNUSED)
    }
    load_eagle_format = (
        load_eagle3 if format_name or any(name.startswith(EAGLE3_PREFIXES) for name in weights) else load_eagle
    )
    return load_eagle_format(source, config, weights, base, dtype)


def _checkpoint_folder(model: Any) -> str:
    """The folder that a model was read from. Raises ValueError for a model that was not loaded."""
    check_base(model)
    folder = getattr(model.text_config, "name_or_path", "") or getattr(model.module.config, "name_or_path", "")
    if not folder:
        raise ValueError(
            f"{model.facts.name} was not loaded from a folder: give load_drafter the folder of the MTP heads, with "
            "base= the model and kind='mtp'"
        )
    return str(folder)
