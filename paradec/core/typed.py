"""Plain data, of a file say, as the annotations of a dataclass have it: checked, and with tuples for lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from paradec.core.checks import shown

T = TypeVar("T")
Reader = Callable[[Any], Any]


def from_fields(cls: type[T], data: Any) -> T:
    """A dataclass from an object with its fields; names that it does not have are passed over.

    Annotations may be int, float, str, Any, `X | None`, lists, tuples, dicts with texts or ints as keys, dataclasses,
    and `Annotated[X, check]`: `check` is called with a value and returns it, or raises ValueError.

    Raises:
        ValueError: a field that is missing, or a value of another type; the message begins with where it is.
    """
    try:
        found: T = _object(cls)(data)
    except ValueError as error:
        raise ValueError(str(error).removeprefix(".")) from None
    return found


def wrong(value: Any, allowed: str) -> ValueError:
    """What a check raises."""
    return ValueError(f"={shown(value)} must be {allowed}")


def _integer(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    raise wrong(value, "an integer of 64 bits")


def _number(value: Any) -> Any:
    if isinstance(value, float) or isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    raise wrong(value, "a number, or an integer of 64 bits")


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    raise wrong(value, "a text")


def _same(value: Any) -> Any:
    return value


@functools.cache
def _reader(kind: Any) -> Reader:
    """What makes a value of a kind out of data."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own = _reader(inside[0])
        return lambda value: inside[1](own(value))
    if origin in (UnionType, Union) and inside[1:] == (NoneType,):
        own = _reader(inside[0])
        return lambda value: None if value is None else own(value)
    if origin is list:
        return _list(_reader(inside[0]))
    if origin is tuple:
        return _tuple([_reader(entry) for entry in inside])
    if origin is dict:
        return _dict(inside[0], _reader(inside[1]))
    assert is_dataclass(kind), kind
    return _object(kind)


NAMES = {int: "an integer", str: "a text"}
PLAIN: dict[Any, Reader] = {int: _integer, float: _number, str: _text, Any: _same}


def _list(read: Reader) -> Reader:
    def listed(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise wrong(value, "a list")
        found: list[Any] = []
        try:
            for entry in value:
                found.append(read(entry))
        except ValueError as error:
            raise ValueError(f"[{len(found)}]{error}") from None
        return found

    return listed


def _tuple(readers: list[Reader]) -> Reader:
    def entries(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(readers):
            raise wrong(value, f"a list of {len(readers)}")
        found: list[Any] = []
        try:
            for read, entry in zip(readers, value, strict=True):
                found.append(read(entry))
        except ValueError as error:
            raise ValueError(f"[{len(found)}]{error}") from None
        return tuple(found)

    return entries


def _dict(key: Any, read: Reader) -> Reader:
    def mapping(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise wrong(value, "an object")
        found = {}
        for name, entry in value.items():
            try:
                own = _integer(int(name)) if key is int else _text(name)  # JSON has no other names than texts
            except (ValueError, TypeError):
                raise ValueError(f" has the name {shown(name)}; it must be {NAMES[key]}") from None
            try:
                found[own] = read(entry)
            except ValueError as error:
                raise ValueError(f"[{shown(name)}]{error}") from None
        return found

    return mapping


def _object(cls: Any) -> Reader:
    hints = get_type_hints(cls, include_extras=True)
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    readers = {f.name: _reader(hints[f.name]) for f in fields(cls)}

    def made(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise wrong(value, "an object")
        for name in required:
            if name not in value:
                raise ValueError(f".{name} is missing")
        found = {}
        for name in readers.keys() & value.keys():
            try:
                found[name] = readers[name](value[name])
            except ValueError as error:
                raise ValueError(f".{name}{error}") from None
        return cls(**found)

    return made
