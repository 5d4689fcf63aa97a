"""Reading a checkpoint folder (or hub repository) with errors that say what is wrong with it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: missing, corrupt, of another format, or asking for unsupported maths."""


def fetch(source: str, filename: str, revision: str | None) -> Path | None:
    """Local path of one file of a folder or hub repository; None when it does not have that file.

    Raises:
        CheckpointError: neither a folder nor a reachable repository.
    """
    if os.path.isdir(source):
        path = Path(source, filename)
        return path if path.is_file() else None
    if os.path.exists(source) or source.startswith((".", "/", "~")):
        raise CheckpointError(f"{source!r} is not a folder with a checkpoint")
    from transformers.utils import cached_file

    try:
        found = cached_file(source, filename, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{source!r} is neither a folder here nor a hub repository in reach: {reason}") from error
    return None if found is None else Path(found)


def read_json(source: str, filename: str, revision: str | None, required: bool = False) -> dict[str, Any]:
    """A JSON object from the checkpoint; {} when it is absent and not required.

    Raises:
        CheckpointError: absent but required, or no JSON object.
    """
    path = fetch(source, filename, revision)
    if path is None:
        if required:
            raise CheckpointError(f"{source!r} has no {filename}")
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{filename} of {source!r} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{filename} of {source!r} holds a {type(data).__name__}, not an object")
    return data


def positive(config: Mapping[str, Any], name: str) -> Any:
    """A positive number from the config (an int stays one).

    Raises:
        CheckpointError: something else stands there.
    """
    value = config.get(name)
    integral = name not in ("rope_theta", "rms_norm_eps", "mlp_ratio")
    kinds = int if integral else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"config.json: {name}={value!r} must be a positive {'integer' if integral else 'number'}")
    return value


def refuse_unless(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError for a field that changes the maths and has a value that is not supported."""
    for name, allowed in only.items():
        value = config.get(name, allowed[0])
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[allowed.index(value)], bool):
            raise CheckpointError(
                f"config.json: {name}={value!r} is not supported; supported: {', '.join(map(repr, allowed))}"
            )


def token_id(name: str, value: Any, vocab_size: int) -> int | None:
    """Check an optional token id.

    Raises:
        CheckpointError: not an id of the vocabulary.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(f"{name}={value!r} is not a token id (0 to {vocab_size - 1})")
    return value
