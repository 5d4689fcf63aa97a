"""Recorded runs of the next-image systems: `<system>/<case>.json` with arrays beside it, and checksums of tensors.

The environment variable PARADEC_NEXT_IMAGE names another folder of that form.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from places import GOLDEN
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(os.environ.get("PARADEC_NEXT_IMAGE", GOLDEN / "next-image"))


def cases(system: str, prefix: str) -> list[str]:
    """Names of the recorded cases, without their endings."""
    return sorted(path.stem for path in (FOLDER / system).glob(f"{prefix}*.json"))


def read(system: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case and its arrays."""
    path = FOLDER / system / f"{name}.json"
    arrays = path.with_suffix(".safetensors")
    return json.loads(path.read_text()), load_file(arrays) if arrays.is_file() else {}


def checksum(tensor: Tensor) -> list[float]:
    """[n, mean, rms, p]: count, mean, root of the mean square, sum(x_i cos i) / sqrt(n), in float64."""
    x = tensor.detach().double().flatten()
    at = torch.arange(len(x), dtype=torch.float64)
    return [len(x), x.mean().item(), x.square().mean().sqrt().item(), (x @ at.cos()).item() / len(x) ** 0.5]
