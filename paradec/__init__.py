"""paradec: fast sampling from models that need not decode one token at a time.

>>> import paradec
>>> model = paradec.load()                                       # the small model inside the package
>>> paradec.generate(model, "Sort: pear fig apple").text        # doctest: +SKIP
'apple fig pear'
"""

from __future__ import annotations

from typing import Any

import paradec.interrupts as _interrupts  # noqa: F401 - first: the other imports take seconds
from paradec import attention, caches, moved, samplers
from paradec.attention.sparsed import SparseD
from paradec.blocks import AdaptiveBlocks, FixedBlocks
from paradec.generate import Output, generate, infill
from paradec.models.checkpoint import CheckpointError
from paradec.models.loading import load
from paradec.models.wrapping import wrap
from paradec.protocol import Interrupted, decode
from paradec.request import Request
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


def __getattr__(name: str) -> Any:
    if name == "hf_generate":  # imports transformers' generation code
        from paradec.hf import hf_generate

        return hf_generate
    if name == "generate_images":  # imports transformers' cache
        from paradec.images import generate_images

        return generate_images
    if name == "load_drafter":  # imports transformers' Llama
        from paradec.models.eagle import load_drafter

        return load_drafter
    if name == "accelerate":
        from paradec.hooks.session import accelerate

        return accelerate
    if name == "TaylorSeer":
        from paradec.samplers.forecast.taylorseer import TaylorSeer

        return TaylorSeer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
