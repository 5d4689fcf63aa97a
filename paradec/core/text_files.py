"""Read and write files of text, lines and JSON, and build dataclasses from JSON. Only line feeds end a line, unlike in
`str.splitlines`, which also splits at characters that texts contain, such as U+2028."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from uuid import uuid4

from paradec.core.checks import short_repr

T = TypeVar("T")
MAX_DEPTH = 100
"""Nesting limit of JSON, since readers of the data are recursive."""


def decode_utf8(data: bytes, name: str) -> str:
    """Decode UTF-8, dropping a byte-order mark. Raises ValueError for other bytes; the message begins with `name`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_text(file: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file with unchanged line ends. Raises ValueError as `decode_utf8`, OSError."""
    return decode_utf8(Path(file).read_bytes(), repr(os.fspath(file)))


def number_lines(text: str) -> list[tuple[int, str]]:
    """List (number, line) of the lines that are not blank. Numbers count from 1; line ends (LF, CRLF) are removed."""
    return [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def number_prompts(file: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """List a prompt file's lines as `number_lines`. Raises ValueError for a table (.csv, .tsv), and as `read_text`."""
    if Path(file).suffix.lower() in (".csv", ".tsv"):
        way = 'df.rename(columns={"text": "prompt"})[["prompt"]].to_json("t.jsonl",orient="records",lines=True)'
        raise ValueError(
            f'{os.fspath(file)!r} is a table: write .jsonl, an object with a "prompt" per line; with pandas: {way}'
        )
    return number_lines(read_text(file))


def read_fasta(file: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Read (line with ">", sequence) pairs from a FASTA file. Raises ValueError for a file of another form."""
    records: list[tuple[str, str]] = []
    for _, line in number_lines(read_text(file)):
        if line.startswith(">"):
            records.append((line, ""))
        elif records:
            records[-1] = (records[-1][0], records[-1][1] + line.strip())
    if not records or not all(sequence for _, sequence in records):
        raise ValueError(f"{os.fspath(file)!r} must be FASTA: lines of names with >, and a sequence after each")
    return records


def read_lines(file: str | os.PathLike[str], read: Callable[[str], T]) -> list[T]:
    """Apply `read` to each line of a prompt file. The message of a ValueError names the line."""
    values = []
    for number, line in number_prompts(file):
        try:
            values.append(read(line))
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)!r}, line {number}: {error}") from None
    return values


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError for other text, or more than `MAX_DEPTH` nested lists and objects."""
    too_deep = ValueError(f"no JSON that can be used: lists and objects are more than {MAX_DEPTH} deep")
    try:
        data = json.loads(text)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:  # also raised for an integer of thousands of digits
        raise ValueError(f"no JSON: {error}") from None
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for outer in level
            if isinstance(outer, (dict, list))
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return data
    raise too_deep


def read_json(file: str | os.PathLike[str]) -> Any:
    """Read a JSON file. Raises as `parse_json` and `read_text`; messages begin with the file's name."""
    try:
        return parse_json(read_text(file))
    except ValueError as error:
        message = str(error)
        raise ValueError(f"{os.fspath(file)!r} is {message}" if message.startswith("no JSON") else message) from None


def json_bytes(data: Any, indent: int | None = None) -> bytes:
    """Encode data as JSON in UTF-8, with a line end and escaped lone surrogates. Raises TypeError or ValueError."""
    return (json.dumps(data, indent=indent, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextmanager
def replace_file(file: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path next to a file; at the end move the temporary file to the file, or delete it after an
    error. If several processes write, the last one wins. A killed process may leave its temporary file."""
    path = Path(os.path.realpath(file))
    draft = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_bytes(file: str | os.PathLike[str], data: bytes) -> None:
    """Write a file completely or not at all."""
    path = Path(os.path.realpath(file))
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_bytes(data)
        return
    with replace_file(path) as draft:
        draft.write_bytes(data)


def write_json(file: str | os.PathLike[str], data: Any, indent: int | None = 1) -> None:
    """Write a JSON file, as `write_bytes`. Raises as `json_bytes`, before writing."""
    write_bytes(file, json_bytes(data, indent))


# ---- dataclasses from plain data ------------------------------------------------------------------------------------

Reader = Callable[[Any], Any]
KEY_TYPES = {int: "an integer", str: "a text"}


def from_fields(cls: type[T], data: Any) -> T:
    """Build a dataclass from a mapping of its fields; other names are ignored. Allowed annotations: int, float, str,
    Any, `X | None`, lists, tuples (from lists), dicts with str or int keys, dataclasses, and `Annotated[X, check]`,
    where `check` returns its argument or raises ValueError. Raises ValueError for a missing field or another type; the
    message begins with the field's path, as in `blocks[2].size`."""
    try:
        return cast(T, _make_reader(cast(Any, cls))(data))
    except ValueError as error:
        raise ValueError(str(error).removeprefix(".")) from None


def check_value(is_valid: bool, value: Any, allowed: str) -> None:
    """Raise ValueError unless `is_valid`; `from_fields` puts the field's path before the message."""
    if not is_valid:
        raise ValueError(f"={short_repr(value)} must be {allowed}")


def _read_int(value: Any, allowed: str = "an integer of 64 bits") -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    check_value(is_int, value, allowed)
    return value


def _read_float(value: Any) -> Any:
    return value if isinstance(value, float) else _read_int(value, "a number, or an integer of 64 bits")


def _read_text(value: Any) -> Any:
    check_value(isinstance(value, str), value, "a text")
    return value


@functools.cache
def _make_reader(kind: Any) -> Reader:
    """Make the reader of one annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (int, float, str, Any):
        return {int: _read_int, float: _read_float, str: _read_text, Any: lambda value: value}[kind]
    if origin is Annotated:
        read, check = _make_reader(arguments[0]), arguments[1]
        return lambda value: check(read(value))
    if origin in (UnionType, Union) and arguments[1:] == (NoneType,):
        read = _make_reader(arguments[0])
        return lambda value: None if value is None else read(value)
    if origin is list:
        return functools.partial(_read_list, _make_reader(arguments[0]))
    if origin is tuple:
        return functools.partial(_read_tuple, [_make_reader(entry) for entry in arguments])
    if origin is dict:
        return functools.partial(_read_dict, arguments[0], _make_reader(arguments[1]))
    assert is_dataclass(kind), kind
    hints = get_type_hints(kind, include_extras=True)
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return functools.partial(_read_object, kind, {f.name: _make_reader(hints[f.name]) for f in fields(kind)}, required)


def _read_entries(entries: Iterable[tuple[Any, Reader, Any]]) -> list[Any]:
    """Read (path or index, reader, value) entries; error messages begin with the path."""
    values = []
    for path, read, value in entries:
        try:
            values.append(read(value))
        except ValueError as error:
            raise ValueError(f"{path if isinstance(path, str) else f'[{path}]'}{error}") from None
    return values


def _read_list(read: Reader, value: Any) -> list[Any]:
    check_value(isinstance(value, (list, tuple)), value, "a list")
    return _read_entries((index, read, entry) for index, entry in enumerate(value))


def _read_tuple(readers: list[Reader], value: Any) -> tuple[Any, ...]:
    check_value(isinstance(value, (list, tuple)) and len(value) == len(readers), value, f"a list of {len(readers)}")
    return tuple(_read_entries(zip(range(len(value)), readers, value, strict=True)))


def _read_dict(key: Any, read: Reader, value: Any) -> dict[Any, Any]:
    check_value(isinstance(value, Mapping), value, "an object")
    keys = []
    for name in value:
        try:
            keys.append(_read_int(int(name)) if key is int else _read_text(name))  # JSON keys are strings
        except (ValueError, TypeError):
            raise ValueError(f" has the name {short_repr(name)}; it must be {KEY_TYPES[key]}") from None
    entries = _read_entries((f"[{short_repr(name)}]", read, entry) for name, entry in value.items())
    return dict(zip(keys, entries, strict=True))


def _read_object(cls: Any, readers: Mapping[str, Reader], required: list[str], value: Any) -> Any:
    check_value(isinstance(value, Mapping), value, "an object")
    for name in required:
        if name not in value:
            raise ValueError(f".{name} is missing")
    names = [name for name in readers if name in value]
    entries = _read_entries((f".{name}", readers[name], value[name]) for name in names)
    return cls(**dict(zip(names, entries, strict=True)))
