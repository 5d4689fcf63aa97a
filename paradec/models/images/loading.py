"""Loaders of image models, by file or folder."""

from __future__ import annotations

import argparse
import importlib
import importlib.resources
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paradec.core.checks import check_names

if TYPE_CHECKING:  # `paradec.load` needs only the names in this file
    from paradec.models.images.base import PictureModel

FAMILIES = {
    "llamagen": ("llamagen", "load_llamagen", "LlamaGenModel"),
    "emu3": ("emu3", "load_emu3", "Emu3Model"),
    "chameleon": ("chameleon", "load_chameleon", "ChameleonModel"),
    "janus": ("janus", "load_janus", "JanusModel"),
    "glm_image": ("glm_image", "load_glm_image", "GlmImageModel"),
    "uvit": ("uvit", "load_masked_image", "MaskedImageModel"),
    "nar": ("nar", "load_nar", "NARModel"),
    "distilled_llamagen": ("distilled_llamagen", "load_distilled_llamagen", "DistilledLlamaGenModel"),
    "distilled_var": ("distilled_var", "load_distilled_var", "DistilledVARModel"),
    "mar": ("mar", "load_mar", "MARModel"),
    "var": ("var", "load_var", "VARModel"),
    "lpd": ("lpd", "load_lpd", "LPDModel"),
}
"""`model_type` of config.json -> names of the module, the loader and the adapter."""
MARKER_TENSORS = {
    "medusa_norm.weight": "nar",
    "medusa_output.weight": "nar",
    "tok_embeddings.bias": "distilled_llamagen",
    "layerwise_n_d_embed.0.weight": "distilled_var",
    "diffusion_pos_embed_learned": "mar",
    "pos_1LC": "var",
    "token_emb.weight": "lpd",
}
"""Name of a tensor -> `model_type` of a single file; the first of these names that is in the file decides."""
PACKAGED = ("digits-ar", "digits-ar-drafter", "digits-lpd", "digits-maskgit", "digits-var", "digits-var-small")

PACKAGED_PIPELINES = ("digits-dit",)
NOT_SIZES = ("model_type", "vq", "defaults")
"""Fields of a folder's config.json that are not sizes of the network."""


def packaged_path(name: str) -> str:
    return str(Path(str(importlib.resources.files("paradec"))) / "assets" / name)


def find_files(source: str | os.PathLike[str], decoder: str, option: Any) -> tuple[str, Path, dict[str, Any], Any]:
    """Return a model's name, the file of its weights, the fields of config.json, and the decoder or its file. Raises
    CheckpointError for a folder without a config.json.

    decoder: the field of config.json with the decoder's file, "vq" or "vae". option: the caller's decoder or file."""
    from paradec.models.checkpoint import read_json

    path = Path(source)
    if not path.is_dir():
        return path.stem, path, {}, option
    fields = read_json(str(path), "config.json", None, required=True)
    default_path = path / str(fields.get(decoder, f"{decoder}.safetensors"))
    option = default_path if option is None and default_path.is_file() else option
    return path.name, path / "model.safetensors", fields, option


def count_blocks(names: Iterable[str], prefix: str) -> int:
    """Count the numbered blocks of a checkpoint by the names of its tensors, "{prefix}.{index}.…"."""
    matches = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def file_type(source: str | os.PathLike[str]) -> str:
    """The `model_type` of a checkpoint that is one file, by the names of its tensors; LlamaGen's by default."""
    import torch
    from safetensors import safe_open

    from paradec.models.weights import find_nested

    try:
        if str(source).endswith(".safetensors"):
            with safe_open(source, framework="pt") as file:
                names = set(file.keys())
        else:  # mmap: only names are read
            with torch.serialization.safe_globals([argparse.Namespace]):
                data = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
            nested = ("model_ema", "ema", "trainer.ema_parameters", "model", "module", "state_dict")
            names = set(next((weights for key in nested if (weights := find_nested(data, key)) is not None), data))
    except Exception:  # the loader will report the error
        return "llamagen"
    return next((kind for name, kind in MARKER_TENSORS.items() if name in names), "llamagen")


def image_loader(model_type: Any) -> Callable[..., Any] | None:
    """The loader of this `model_type`, or None for other models."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return None
    module, name, _ = FAMILIES[model_type]
    return getattr(importlib.import_module(f"paradec.models.images.{module}"), name)


def image_adapter(model_type: str) -> type[PictureModel]:
    """The adapter class of this `model_type`, a key of `FAMILIES`."""
    module, _, name = FAMILIES[model_type]
    return getattr(importlib.import_module(f"paradec.models.images.{module}"), name)


def load_image_model(model_type: str, source: str, options: Mapping[str, Any], **common: Any) -> Any:
    """Load an image model. Raises ValueError for an option that its family does not have.

    options: the user's image options. common: dtype, device and revision; passed on if the loader accepts them."""
    loader = image_loader(model_type)
    assert loader is not None  # checked by the caller
    parameters = inspect.signature(loader).parameters.values()
    allowed = [p.name for p in parameters if p.name != "source" and p.kind is not p.VAR_KEYWORD]
    check_names(f"option of {model_type!r} models", options, allowed)
    common_options = {name: value for name, value in common.items() if name in allowed and value is not None}
    return loader(os.fspath(source), **common_options, **options)
