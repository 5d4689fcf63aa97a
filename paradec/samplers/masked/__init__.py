"""Masked diffusion models, text and pictures: a method is a rule that says which undecided positions become final.

`base.py` is the loop's stages, `state.py` what changes while it runs; every other method has a file of its own.
"""

from __future__ import annotations

import importlib
from typing import Any

BASE = ("LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View")
"""What a new method needs, from `base.py`, which is not imported for a stop rule alone."""


def __getattr__(name: str) -> Any:
    if name not in BASE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("paradec.samplers.masked.loop"), name)
