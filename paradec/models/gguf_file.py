"""GGUF files: what their header says, before anything reads the weights. transformers does that, with the package gguf.

The header is little-endian: "GGUF", a version, the number of tensors and of metadata entries, then the entries, each a
name, a type and a value.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from paradec.core.checks import shown
from paradec.models.checkpoint import CheckpointError, fetch

ENDING = ".gguf"
ENCODERS = (
    *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"),
    *("t5encoder", "gemma-embedding", "clip"),
)
"""Architectures that give no next token, as GGUF names them."""
MASKED = ("llada", "llada-moe", "dream", "rnd1")
"""Those of masked diffusion: transformers has none of them."""
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""How a value of each type is packed; type 8 is a text, type 9 a list."""
TEXT, LIST = 8, 9
LONGEST_TEXT = 2**28
DEEPEST = 8
"""Lists within lists."""


def file_of(source: str, gguf_file: str | None) -> tuple[str, str | None]:
    """The folder or repository, and the GGUF file in it: "folder/file.gguf" and "owner/repository/file.gguf" name both.

    Raises:
        CheckpointError: another ending, or two files.
    """
    if gguf_file is not None and (not isinstance(gguf_file, str) or not gguf_file.endswith(ENDING)):
        raise CheckpointError(f"gguf_file={shown(gguf_file)} must be the name of a file that ends in {ENDING!r}")
    if not source.endswith(ENDING) or os.path.isdir(source):
        return source, gguf_file
    if gguf_file is not None:
        raise CheckpointError(f"source={shown(source)} names a GGUF file, and gguf_file={gguf_file!r} another")
    if os.path.exists(source) or source.count("/") < 2 or source.startswith((".", "/", "~")):
        folder, name = os.path.split(source)
        return folder or ".", name
    owner, repository, name = source.split("/", 2)
    return f"{owner}/{repository}", name


def check_file(source: str, gguf_file: str, revision: str | None) -> None:
    """Raise CheckpointError unless the file is there, whole as far as its header goes, and of an architecture that
    transformers reads."""
    path = fetch(source, gguf_file, revision)
    if path is None:
        raise CheckpointError(f"{source!r} has no {gguf_file}")
    architecture = metadata(path).get("general.architecture")
    if architecture in ENCODERS:
        raise CheckpointError(f"{gguf_file} of {source!r} holds {architecture!r}, an encoder: it gives no next token")
    if architecture in MASKED:
        raise CheckpointError(
            f"{gguf_file} of {source!r} holds {architecture!r}, a masked diffusion model, which transformers does not "
            "read from GGUF; load the published checkpoint"
        )
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    if _letters(architecture) not in map(_letters, known):  # "qwen2moe" here is "qwen2_moe" there
        raise CheckpointError(
            f"{gguf_file} of {source!r} holds {shown(architecture)}, which transformers does not read from GGUF; it "
            f"reads {', '.join(known)}"
        )


def _letters(name: Any) -> str:
    return str(name).replace("-", "").replace("_", "")


def metadata(path: Path) -> dict[str, Any]:
    """The metadata entries of a GGUF file that are numbers and texts; lists are passed over.

    Raises:
        CheckpointError: another kind of file, or one that is cut off.
    """
    found: dict[str, Any] = {}
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{str(path)!r} is no GGUF file")
        try:
            version, _, count = struct.unpack("<IQQ", _bytes(file, 20))
            if version not in (2, 3):
                raise CheckpointError(f"{str(path)!r} is GGUF version {version}; versions 2 and 3 are read")
            for _ in range(count):
                name = _text(file)
                value = _value(file, _number(file, "I"))
                if value is not None:
                    found[name] = value
        except (struct.error, EOFError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the header of {str(path)!r} cannot be read: {error}") from error
    return found


def _value(file: BinaryIO, kind: int, depth: int = 0) -> Any:
    """The next value; None of a list."""
    if kind in NUMBERS:
        return _number(file, NUMBERS[kind])
    if kind == TEXT:
        return _text(file)
    if kind != LIST or depth == DEEPEST:
        raise EOFError(f"a value of type {kind}")
    entries, count = _number(file, "I"), _number(file, "Q")
    if entries in NUMBERS:
        file.seek(struct.calcsize(NUMBERS[entries]) * min(count, 2**40), os.SEEK_CUR)
        return None
    for _ in range(count):
        _value(file, entries, depth + 1)
    return None


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, _bytes(file, struct.calcsize("<" + code)))[0]


def _text(file: BinaryIO) -> str:
    return _bytes(file, _number(file, "Q")).decode("utf-8")


def _bytes(file: BinaryIO, count: int) -> bytes:
    if count > LONGEST_TEXT:
        raise EOFError(f"a text of {count} bytes")
    found = file.read(count)
    if len(found) < count:
        raise EOFError("it ends within")
    return found
