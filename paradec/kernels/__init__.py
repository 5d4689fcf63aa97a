"""Kernels for NVIDIA GPUs in Triton, a folder each: `api.py` is what callers use, `reference.py` the plain computation
that every path is held to, `portable.py` the PyTorch path of other machines, `triton.py` the kernels.

They import where triton is not installed, and serve by the portable path then. Where it is, it is imported when a call
first asks whether it is there: `import paradec` does not.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch


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


@functools.cache
def exp_is_faster() -> bool:
    """Whether torch.exp takes less time than torch.exp2 on this machine's processor: two thirds on Intel's. On AMD's it
    takes three times as long, through MKL. The same in every run, which a measurement would not be."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkl.is_available() and "intel" in str(known.get("cpu_name", "")).lower()
