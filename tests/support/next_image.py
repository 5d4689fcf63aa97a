"""Recorded cases of next-scale, neighbour, grouped, distilled and two-model image samplers.

A folder holds one file a case. Tests take what they find there, and every setting and model's name from the file
itself, so that other cases of the same form can take their place: PARADEC_NEXT_IMAGE names another folder of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from places import golden, golden_file
from safetensors.torch import load_file
from torch import Tensor


def cases(system: str, holds: str) -> list[str]:
    """Names of a system's cases of the kind that has this field, or this array."""
    found = {path.stem: json.loads(path.read_text()) for path in (golden("next-image") / system).glob("*.json")}
    return sorted(name for name, said in found.items() if "id" in said and holds in {*said, *said.get("tensors", ())})


def file(system: str, name: str) -> Path:
    """A file of a system, "model-a.safetensors"; of the folder itself where `system` is empty."""
    return golden_file("next-image", str(Path(system, name)))


def case(system: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case, or a model's configuration ("vae.config"), and the arrays beside it."""
    arrays = file(system, f"{name.removesuffix('.config')}.safetensors")
    return json.loads(file(system, f"{name}.json").read_text()), load_file(arrays) if arrays.exists() else {}


def checksum(tensor: Tensor) -> list[float]:
    """[n, mean, root of the mean square, sum x_i cos(i) / sqrt(n)], in float64."""
    x = tensor.detach().double().flatten()
    wave = torch.arange(len(x), dtype=torch.float64).cos()
    return [float(len(x)), float(x.mean()), float(x.square().mean().sqrt()), float((x * wave).sum() / len(x) ** 0.5)]


def assert_checksum(tensor: Tensor, expected: list[float], tolerance: float = 2e-5) -> None:
    """Within `tolerance` of max(1, |value|)."""
    found = checksum(tensor)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)), (found, expected)
