"""Recorded cases of next-scale, neighbour, grouped, distilled and two-model image samplers.

A folder holds one file a case. Tests take what they find there, and every setting and model's name from the file
itself, so that other cases of the same form can take their place (`tests/replays.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from recorded import find_weights, golden, read_arrays, read_head, read_json
from safetensors.torch import load_file
from torch import Tensor


def cases(system: str, holds: str) -> list[str]:
    """Names of a system's cases of the kind that has this field, or this array."""
    found = {path.stem: read_head(path) for path in (golden("next-image") / system).glob("*.json")}
    return sorted(name for name, said in found.items() if "id" in said and holds in {*said, *said.get("tensors", ())})


def file(system: str, name: str) -> Path:
    """A file of a system, "model-a.safetensors"; of the folder itself where `system` is empty."""
    return find_weights(str(Path(system, name)), "next-image")


def case(system: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case, or a model's configuration ("vae.config"), and the arrays beside it."""
    path = file(system, f"{name}.json")
    arrays = path.with_name(f"{path.stem.removesuffix('.config')}.safetensors")
    if name.endswith(".config"):
        return dict(read_head(path)), load_file(arrays) if arrays.exists() else {}
    record, found = read_json(path), read_arrays(arrays) if arrays.exists() else {}
    assert record.get("tensors", {}) == {key: list(tensor.shape) for key, tensor in dict.items(found)}
    return record, found


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
