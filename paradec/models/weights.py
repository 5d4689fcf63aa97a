"""Tensors from single files: safetensors, and pickles (only their tensors)."""

from __future__ import annotations

import argparse
import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paradec.models.checkpoint import DTYPES, CheckpointError, check_dtypes, checkpoint_errors

NOTHING = r"(?!)"  # a pattern that no text matches
PICKLES = (".pt", ".pth", ".ckpt", ".bin")
NESTED = ("model", "module", "state_dict")
"""Keys under which training frameworks (DDP, DeepSpeed, Lightning) store the weights."""


def find_nested(mapping: Any, path: str) -> dict[str, Any] | None:
    """The dict at a path of keys in nested dicts ("trainer.ema"), or None."""
    for key in path.split("."):
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping if isinstance(mapping, dict) else None


def read_weights(
    source: str | os.PathLike[str], unused: str = NOTHING, nested: Sequence[str] = NESTED, mmap: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights by name, and the metadata of a safetensors file (JSON values decoded; {} for a pickle). A pickle is
    read with `weights_only=True`: code in it is not run.

    unused: pattern of the names of tensors that are not weights; these may have any dtype.
    nested: possible paths of the weights in a pickle, as for `find_nested`; the first that exists is used.
    mmap: whether to memory-map a pickle in the zip format, so that parts other than the weights use no memory.
    Raises CheckpointError for a file that is missing, corrupt or of another kind, or weights that are not
    floating-point numbers."""
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path, unused)
    if path.suffix not in PICKLES:
        raise CheckpointError(f"{str(path)!r} must be a .safetensors file, or one of {', '.join(PICKLES)}")
    # pickle, zip and torch raise many kinds of errors
    unreadable = checkpoint_errors(f"{str(path)!r} cannot be read as plain tensors (code in it is not run)", Exception)
    # training scripts also store their arguments; a Namespace holds only data
    with unreadable, torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    content = next((mapping for key in nested if (mapping := find_nested(content, key)) is not None), content)
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(content).__name__}, not weights by name")
    weights = {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    if not weights:
        keys = f"{sorted(map(str, content))[:5]}"
        hint = "; read ProteinMPNN with paradec.load_protein_mpnn(file, structures)" if "num_edges" in content else ""
        raise CheckpointError(f"{str(path)!r} holds no weights by name; its keys are {keys}{hint}")
    check_dtypes(
        str(path), {name: tensor.dtype for name, tensor in weights.items() if not re.search(unused, str(name))}
    )
    return weights, {}


def _read_safetensors(path: Path, unused: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    unreadable = checkpoint_errors(f"{str(path)!r} cannot be read", SafetensorError, OSError, ValueError)
    with unreadable, safe_open(path, framework="pt") as file:
        codes = {name: file.get_slice(name).get_dtype() for name in file.keys() if not re.search(unused, name)}
        check_dtypes(str(path), {name: DTYPES.get(code, code) for name, code in codes.items()})
        weights = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata() or {}
    decoded: dict[str, Any] = {}
    for name, text in metadata.items():
        try:
            decoded[name] = json.loads(text)
        except ValueError:
            decoded[name] = text
    return weights, decoded
