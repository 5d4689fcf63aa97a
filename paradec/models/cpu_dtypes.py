"""A hint for bfloat16 checkpoints that run in float32 on a CPU which multiplies bfloat16 faster."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

FAST = ("amx_tile", "avx512_bf16")
"""Instructions that multiply bfloat16, as torch.cpu names them."""
_said = False


def bfloat16_is_fast() -> bool:
    """Whether this CPU has instructions of `FAST`. Without them bfloat16 is slower than float32."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(found.get(name) or getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in FAST)


def hint(name: str, stored: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
    """Warn, once in a process, where bfloat16 would be faster: weights stored so that run in float32 on such a CPU.

    Args:
        name: of the checkpoint. stored: dtypes of its tensors, as torch names them. dtype, device: of the model.
    """
    global _said
    if (
        _said
        or device.type != "cpu"
        or dtype != torch.float32
        or "bfloat16" not in set(stored)
        or not bfloat16_is_fast()
    ):
        return
    _said = True
    warnings.warn(
        f"{name!r} is stored in bfloat16 and runs in float32, and this CPU multiplies bfloat16 faster: "
        "load(..., dtype='bfloat16') takes half the memory, and tokens may differ where two are nearly as likely",
        stacklevel=4,
    )
