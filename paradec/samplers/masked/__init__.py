"""Masked diffusion models, text and pictures: a method is a rule that says which undecided positions become final.

`base.py` is the loop's stages, `state.py` what changes while it runs; every other method has a file of its own.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """What a new method needs (`MaskedSampler`, `View`, ...), without importing the base for a stop rule alone."""
    base = importlib.import_module("paradec.samplers.masked.base")
    if name.startswith("_") or not hasattr(base, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(base, name)
