"""Golden cases of the next-image systems: what the public reference implementations do on tiny models, as data."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(os.environ.get("PARADEC_NEXT_IMAGE", Path(__file__).parent / "golden" / "next-image"))


def cases(system: str, prefix: str) -> list[str]:
    """Names of a system's cases, in order."""
    return sorted(path.stem for path in (FOLDER / system).glob(f"{prefix}-*.json"))


def read(system: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case, or a model's configuration ("vae.config"), and the arrays beside it."""
    path = FOLDER / system / f"{name}.json"
    arrays = path.with_name(f"{name.removesuffix('.config')}.safetensors")
    return json.loads(path.read_text()), load_file(arrays) if arrays.exists() else {}


def checksum(tensor: Tensor) -> list[float]:
    """[n, mean, rms, p] in float64."""
    flat = tensor.detach().double().flatten()
    wave = (flat * torch.arange(len(flat)).double().cos()).sum() / math.sqrt(len(flat))
    return [len(flat), float(flat.mean()), float(flat.square().mean().sqrt()), float(wave)]


def close(tensor: Tensor, expected: list[float], tolerance: float = 2e-5) -> bool:
    """Whether the checksum is that of the reference: `tolerance` of max(1, |value|)."""
    found = checksum(tensor)
    return found[0] == expected[0] and all(
        abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in zip(found[1:], expected[1:], strict=True)
    )
