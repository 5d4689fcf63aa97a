"""Kernels, with one folder per operation: `reference.py` (definitions), `portable.py` (PyTorch) and, except for int8,
`api.py` (entry points) and `triton.py` (for NVIDIA GPUs; triton is imported at first use)."""

from __future__ import annotations

import functools
import importlib
import os


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported. Imports it."""
    try:
        importlib.import_module("triton.language")
    except ImportError:  # no build for this machine
        return False
    return True


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1, set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
