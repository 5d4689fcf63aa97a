"""Triton kernels for NVIDIA GPUs, one folder each: `api.py` (entry points), `reference.py` (definitions), `portable.py`
(PyTorch), `triton.py` (kernels, which import triton at first use)."""

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
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the import)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
