"""Continuous models: at some solver steps the output is forecast from earlier evaluations instead of evaluated."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """What a new method needs (`ForecastSampler`, ...), without importing the base for a refresh rule alone."""
    base = importlib.import_module("paradec.samplers.forecast.base")
    if name.startswith("_") or not hasattr(base, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(base, name)
