"""Kernels for NVIDIA GPUs in Triton, a folder each: `api.py` is what callers use, `reference.py` the plain computation
that every path is held to, `portable.py` the PyTorch path, `triton.py` the kernels. triton is imported at the first
call that asks for it; without it the portable path serves."""

from __future__ import annotations

import functools
import importlib
import os


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed, which imports it."""
    try:
        importlib.import_module("triton.language")
    except ImportError:  # no build for this machine
        return False
    return True


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 must be set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
