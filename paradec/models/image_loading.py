"""Which file or folder holds which image model, and the options that each of them takes."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paradec.registry import unknown

FAMILIES = {
    "llamagen": "paradec.models.llamagen:load_llamagen",
    "emu3": "paradec.models.emu3:load_emu3",
    "chameleon": "paradec.models.chameleon:load_chameleon",
    "janus": "paradec.models.janus:load_janus",
    "uvit": "paradec.models.masked_image:load_masked_image",
}
"""What loads an image model, by the `model_type` of config.json."""
PACKAGED = ("digits-ar", "digits-maskgit")
"""Image models inside the package."""


def packaged_image(name: str) -> str:
    """The folder of an image model inside the package."""
    return str(Path(str(importlib.resources.files("paradec"))) / "data" / name)


def image_loader(model_type: Any) -> Callable[..., Any] | None:
    """What loads checkpoints of this `model_type`, or None for other models."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return None
    module, _, name = FAMILIES[model_type].partition(":")
    return getattr(importlib.import_module(module), name)


def load_image_model(model_type: str, source: str, options: Mapping[str, Any], **common: Any) -> Any:
    """Load one.

    Args:
        options: what the user gave beyond the arguments of every model.
        common: dtype, device, revision; those that are None, or that the family does not know, are left out.

    Raises:
        ValueError: an option that this family does not take; the message lists those it does.
    """
    loader = image_loader(model_type)
    takes = [name for name in inspect.signature(loader).parameters if name != "source"]
    for name in options:
        if name not in takes:
            raise ValueError(unknown(f"option of {model_type!r} models", name, takes))
    known = {name: value for name, value in common.items() if name in takes and value is not None}
    return loader(os.fspath(source), **known, **options)
