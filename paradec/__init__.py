"""paradec: fast sampling from models that need not decode one token at a time.

>>> import paradec
>>> model = paradec.load()                                       # the small model inside the package
>>> paradec.generate(model, "Sort: pear fig apple").text        # doctest: +SKIP
'apple fig pear'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import paradec.interrupts as _interrupts  # noqa: F401 - first: the other imports take seconds
from paradec import attention, caches, moved, samplers
from paradec.attention.sparsed import SparseD
from paradec.blocks import AdaptiveBlocks, FixedBlocks
from paradec.generate import Output, generate, infill
from paradec.protocol import Interrupted, decode
from paradec.request import Request

if TYPE_CHECKING:
    from paradec.hf import hf_generate
    from paradec.hooks.session import accelerate
    from paradec.images import generate_images
    from paradec.models.checkpoint import CheckpointError
    from paradec.models.eagle import load_drafter
    from paradec.models.loading import load
    from paradec.models.wrapping import wrap
    from paradec.samplers.forecast.taylorseer import TaylorSeer
    from paradec.samplers.masked.prophet import Prophet

__version__ = "0.1.0"

moved.install()

__all__ = [
    "AdaptiveBlocks",
    "CheckpointError",
    "FixedBlocks",
    "Interrupted",
    "Output",
    "Prophet",
    "Request",
    "SparseD",
    "TaylorSeer",
    "accelerate",
    "attention",
    "caches",
    "decode",
    "generate",
    "generate_images",
    "hf_generate",
    "infill",
    "load",
    "load_drafter",
    "samplers",
    "wrap",
]


LATER = {
    "CheckpointError": "paradec.models.checkpoint",
    "Prophet": "paradec.samplers.masked.prophet",
    "TaylorSeer": "paradec.samplers.forecast.taylorseer",
    "accelerate": "paradec.hooks.session",
    "generate_images": "paradec.images",
    "hf_generate": "paradec.hf",
    "load": "paradec.models.loading",
    "load_drafter": "paradec.models.eagle",
    "wrap": "paradec.models.wrapping",
}
"""Imported when they are first asked for; some of them import parts of transformers."""


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
