"""Masked diffusion models of text and images. A method is a rule that selects undecided positions to make final."""

from __future__ import annotations

import importlib
from typing import Any

BASE = ("LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View")
"""Names that a new method imports. They come from `loop.py`, which is loaded only when one of them is first used."""


def __getattr__(name: str) -> Any:
    if name not in BASE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("paradec.samplers.masked.loop"), name)
