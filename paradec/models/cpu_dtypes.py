"""A hint for bfloat16 checkpoints that run in float32 on a CPU which multiplies bfloat16 faster."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch

FAST = ("amx_tile", "avx512_bf16")
"""Instructions that multiply bfloat16, as torch.cpu names them."""
GAIN = 0.9
"""Of float32's time; what takes more is not called faster."""
POSITIONS, WIDTH, TURNS = 32, 1024, 5
"""Of the products that are timed: a block's positions, a square matrix."""
_said = False


def bfloat16_is_fast() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32: it has instructions of `FAST`, and a product shows it.

    The names alone do not tell: there are processors with avx512_bf16 (and AMX turned off) on which oneDNN's products
    of bfloat16 take 1.3 to 1.8 times as long as those of float32. The probe takes some ten milliseconds.
    """
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not any(found.get(name) or getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in FAST):
        return False
    return _fastest(torch.bfloat16) <= GAIN * _fastest(torch.float32)


@torch.inference_mode()
def _fastest(dtype: torch.dtype) -> float:
    """Seconds of the fastest of some products."""
    hidden, weight = torch.ones(POSITIONS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    taken = []
    for _ in range(TURNS + 1):  # the first one also makes the kernel
        begin = time.perf_counter()
        torch.nn.functional.linear(hidden, weight)
        taken.append(time.perf_counter() - begin)
    return min(taken)


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
