"""The kit's data: a folder, or the archive that `benchmarks/conformance_archive.py` packs of it.

`manifest.json` names every file with its SHA-256. All of a manifest is checked before anything is read, so that a
result speaks of data that is known: `Data.digest` is the hash of all names and hashes, equal for the folder in a
checkout, the archive, and what was unpacked of it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from paradec.core.checks import shown
from paradec.tools.conformance import KIT_VERSION

SCHEMA = "paradec-conformance/1"
MANIFEST = "manifest.json"
LICENCE = "Apache-2.0"
LARGEST = 256 * 2**20
"""Bytes that an archive may hold, unpacked."""
TRACES = ("traces", "moe/traces")
FOLDERS = (
    *("llada", "dream", "fastdllm", "fastdllm-jun25", "fastdllm-dream", "adablock", "adablock-dream", "dinfer"),
    *("dkv", "dkv-dream", "freedave", "llada20_generate", "llada20_batch", "llada21_generate", "llada_moe_generate"),
)
"""Of the traces, those that `paradec.tools.conformance.traces` reads."""
OWN = "conformance"
"""The folder of cases that were made for the kit, with their checkpoints."""
_UNUSED = re.compile(r"(logits_check|forwards)\.|(prompts|tokenizer_table)\.json$")
"""Files beside the checkpoints that no case reads."""


@dataclass(frozen=True)
class Data:
    """The kit's files, checked."""

    folder: Path
    files: Mapping[str, str]
    """SHA-256 by name, names relative to the folder."""
    version: str
    """Of the kit that packed them."""

    @property
    def digest(self) -> str:
        """SHA-256 of all names and hashes."""
        return digest(self.files)

    def json(self, name: str) -> Any:
        """A file's content; a KeyError where the manifest does not have it."""
        if name not in self.files:
            raise KeyError(name)
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def names(self, under: str) -> list[str]:
        """All JSON files somewhere below a folder, sorted."""
        return sorted(name for name in self.files if name.startswith(f"{under}/") and name.endswith(".json"))


def digest(files: Mapping[str, str]) -> str:
    """SHA-256 over the lines "hash  name", sorted by name."""
    return hashlib.sha256("".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode()).hexdigest()


def checkpoint(folder: str, model: str) -> str:
    """The name of the checkpoint that a folder of traces was recorded on: beside the traces of all methods."""
    return (PurePosixPath(folder).parent / model).as_posix()


def members(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a checkout's tests/golden, or of a folder of its form, that belong to the kit, by name:
    traces, the checkpoints that they name, and the kit's own cases, where there are any.

    Raises:
        ValueError: a file of traces that names no model, or one whose checkpoint is not there.
    """
    tops = {folder / top / name: top for top in TRACES for name in FOLDERS}
    traces = [(top, path) for place, top in tops.items() for path in sorted(place.glob("*.json"))]
    models = {folder / checkpoint(top, _model(path)): path for top, path in traces}
    for model, path in models.items():
        if not (model / "config.json").is_file():
            raise ValueError(f"{str(model)!r} has no config.json: it is the checkpoint that {str(path)!r} names")
    found = {}
    for place in [*sorted(models), folder / OWN, *tops]:
        for path in sorted(place.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not _UNUSED.search(name):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _model(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} holds no recorded traces: it names no model") from error


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkout's tests/golden."""
    files = members(folder)
    return {"schema": SCHEMA, "version": KIT_VERSION, "licence": LICENCE, "digest": digest(files), "files": files}


def pack(folder: Path, out: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """Write the archive of a folder as `members` reads it; the same files give the same bytes.

    Args:
        texts: further files by name, which no case reads: a licence, a note.

    Returns:
        The manifest, which is the archive's first file.
    """
    said = manifest(folder)
    said["texts"] = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    contents = {MANIFEST: (json.dumps(said, indent=1, sort_keys=True) + "\n").encode()}
    contents |= {name: texts[name].encode() for name in sorted(texts)}
    contents |= {name: (folder / name).read_bytes() for name in sorted(said["files"])}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"paradec-conformance/{name}")  # mtime, owner and mode are the same everywhere
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    with out.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(buffer.getvalue())
    return said


def find() -> Path:
    """The data of a source checkout.

    Raises:
        ValueError: paradec was installed without it.
    """
    place = Path(__file__).resolve().parents[3] / "tests" / "golden"
    if (place / OWN / "laws.json").is_file():
        return place
    raise ValueError(
        "the conformance data is not in the wheel: give --data paradec-conformance-VERSION.tar.gz, which `python "
        "benchmarks/conformance_archive.py` makes in a checkout of paradec"
    )


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[Data]:
    """The data of an archive, a folder that one was unpacked to, a checkout's tests/golden, or (None) of the checkout
    that paradec runs from. An archive is unpacked for as long as it is open.

    Raises:
        ValueError: no data, another schema, or a file that is missing, not named in the manifest, of another hash or
            outside of the folder; the message names it.
    """
    path = find() if path is None else path
    if path.is_dir():
        yield _folder(path)
    elif path.is_file():
        with tempfile.TemporaryDirectory(prefix="paradec-conformance-") as place:
            yield _unpacked(path, Path(place))
    else:
        raise ValueError(f"--data {str(path)!r} is neither a folder nor an archive")


def _folder(path: Path) -> Data:
    inner = path / "paradec-conformance"
    path = inner if (inner / MANIFEST).is_file() else path
    if not (path / MANIFEST).is_file():
        said = manifest(path)
        if not said["files"]:
            raise ValueError(f"--data {str(path)!r} has no {MANIFEST}, and is no tests/golden of a checkout")
        return Data(path, said["files"], said["version"])
    files, texts, version = _read_manifest((path / MANIFEST).read_bytes(), str(path))
    for name, expected in (files | texts).items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"--data {str(path)!r} lacks {name}, which its manifest names")
        _check_hash(name, file.read_bytes(), expected)
    return Data(path, files, version)


def _unpacked(path: Path, place: Path) -> Data:
    try:
        with tarfile.open(path, "r:gz") as tar:
            entries = tar.getmembers()
            contents: dict[str, bytes] = {}
            if sum(entry.size for entry in entries) > LARGEST:
                raise ValueError(f"{str(path)!r} would unpack to more than {LARGEST >> 20} MiB")
            for entry in entries:
                name = _inner_name(entry)
                if name in contents:
                    raise ValueError(f"the archive holds {name} twice")
                file = tar.extractfile(entry)
                assert file is not None  # of a regular file, which `_inner_name` has seen to
                contents[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is no whole .tar.gz archive: {error}") from error
    if MANIFEST not in contents:
        raise ValueError(f"{str(path)!r} has no {MANIFEST}: it is no archive of the conformance kit")
    files, texts, version = _read_manifest(contents.pop(MANIFEST), str(path))
    named = files | texts
    for name in sorted(named.keys() ^ contents.keys()):
        raise ValueError(f"{str(path)!r} {'lacks' if name in named else 'holds'} {name}, against its manifest")
    for name, content in contents.items():
        _check_hash(name, content, named[name])
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return Data(place, files, version)


def _inner_name(entry: tarfile.TarInfo) -> str:
    """A member's name below the archive's one folder; an error for anything but a regular file in it."""
    parts = PurePosixPath(entry.name).parts
    if not entry.isreg() or len(parts) < 2 or parts[0] != "paradec-conformance" or not _inside(parts[1:]):
        raise ValueError(f"the archive holds {shown(entry.name)}, which is no plain file of its own folder")
    return "/".join(parts[1:])


def _inside(parts: tuple[str, ...]) -> bool:
    return all(part not in ("..", "/") and "\\" not in part and ":" not in part for part in parts)


def _read_manifest(content: bytes, where: str) -> tuple[dict[str, str], dict[str, str], str]:
    """Hashes of the files and of the texts beside them, and the kit's version."""
    try:
        said = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} of {where} is no JSON: {error}") from error
    if not isinstance(said, dict) or said.get("schema") != SCHEMA:
        schema = said.get("schema") if isinstance(said, dict) else None
        raise ValueError(f"{MANIFEST} of {where} has schema={shown(schema)}; this version reads {SCHEMA!r}")
    files, texts = _hashes(said.get("files"), where), _hashes(said.get("texts", {}), where)
    if not all(
        isinstance(part, dict) and all(isinstance(each, str) for each in part.values()) for part in (files, texts)
    ):
        raise ValueError(f"{MANIFEST} of {where} does not have the hashes of its files")
    for name in (*files, *texts):
        pure = PurePosixPath(name)
        if pure.is_absolute() or not _inside(pure.parts):
            raise ValueError(f"{MANIFEST} of {where} names {shown(name)}, which is outside of its folder")
    if said.get("digest") != digest(files):
        raise ValueError(f"{MANIFEST} of {where} has digest={shown(said.get('digest'))}, its files {digest(files)}")
    return files, texts, str(said.get("version"))


def _hashes(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise ValueError(f"{MANIFEST} of {where} does not have the hashes of its files")
    return value


def _check_hash(name: str, content: bytes, expected: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{name} has SHA-256 {found}, its manifest {expected}")
