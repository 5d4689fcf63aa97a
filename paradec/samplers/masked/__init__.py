"""Masked diffusion models, text and images: a method is a rule that says which undecided positions become final."""

from __future__ import annotations

import importlib
from typing import Any

BASE = ("LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View")
"""Interface of a new method, from `loop.py`, which a stop rule does not need."""


def __getattr__(name: str) -> Any:
    if name not in BASE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("paradec.samplers.masked.loop"), name)
