"""Files of text, of lines and of JSON: what reads them, and what writes them.

A line ends at "\\n" alone. `str.splitlines` ends lines at form feeds, U+0085, U+2028 and others too, which texts hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

T = TypeVar("T")
MOST_NESTED = 100
"""Lists and objects inside of each other that JSON may have: what handles the data calls itself once for each."""


def decoded(data: bytes, name: str) -> str:
    """UTF-8 as text, without a mark of the byte order at its start.

    Raises:
        ValueError: other bytes; the message begins with `name`.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_text(file: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, its line ends as they are.

    Raises:
        ValueError: other bytes; the message begins with the file's name. OSError: it cannot be read.
    """
    return decoded(Path(file).read_bytes(), repr(os.fspath(file)))


def lines_of(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1; "\\n" and a "\\r" before it are no part of them."""
    return [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def read_lines(file: str | os.PathLike[str], read: Callable[[str], T]) -> list[T]:
    """What `read` makes of each line of a file that is not blank. Raises what it raises; ValueErrors name the line."""
    found = []
    for number, line in lines_of(read_text(file)):
        try:
            found.append(read(line))
        except ValueError as error:
            raise ValueError(f"{os.fspath(file)!r}, line {number}: {error}") from None
    return found


def parse_json(text: str) -> Any:
    """The data of a JSON text.

    Raises:
        ValueError: another text, or lists and objects more than `MOST_NESTED` deep.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer of thousands of digits is one too
        raise ValueError(f"no JSON: {error}") from None
    inside = [data]
    for _ in range(MOST_NESTED):
        inside = [
            value
            for outer in inside
            if isinstance(outer, (dict, list))
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(value, (dict, list))
        ]
        if not inside:
            return data
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"no JSON that can be used: lists and objects are more than {MOST_NESTED} deep")


def read_json(file: str | os.PathLike[str]) -> Any:
    """The data of a file of JSON.

    Raises:
        ValueError: as `parse_json` and `read_text`; the message begins with the file's name. OSError: as `read_text`.
    """
    try:
        return parse_json(read_text(file))
    except ValueError as error:
        said = str(error)
        raise ValueError(f"{os.fspath(file)!r} is {said}" if said.startswith("no JSON") else said) from None


def json_bytes(data: Any, indent: int | None = None) -> bytes:
    """Data as JSON in UTF-8 with a line end after it: one line without `indent`. Lone surrogates, which UTF-8 cannot
    have, are escaped.

    Raises:
        TypeError, ValueError: something that JSON does not have.
    """
    return (json.dumps(data, indent=indent, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


@contextmanager
def replacing(file: str | os.PathLike[str]) -> Iterator[Path]:
    """A path next to a file, of this call alone, that takes the file's place at the end unless an error is raised.

    Of several processes that write one file the last one wins. One that is killed may leave its draft behind, which
    nothing reads.
    """
    path = Path(os.path.realpath(file))
    draft = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_bytes(file: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all: the old content stays until the new content is complete."""
    path = Path(os.path.realpath(file))
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_bytes(data)
        return
    with replacing(path) as draft:
        draft.write_bytes(data)


def write_json(file: str | os.PathLike[str], data: Any, indent: int | None = 1) -> None:
    """Write data as JSON, as `write_bytes` does. Raises: as `json_bytes`, before anything is written."""
    write_bytes(file, json_bytes(data, indent))
