"""Masked diffusion models, text and images: a method is a rule that selects the undecided positions to make final."""

from __future__ import annotations

import importlib
from typing import Any

BASE = ("LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View")
"""Names that a new method imports. `loop.py` has them and is loaded at first use; stop rules do not need it."""


def __getattr__(name: str) -> Any:
    if name not in BASE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("paradec.samplers.masked.loop"), name)
