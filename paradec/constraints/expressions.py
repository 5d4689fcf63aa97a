"""Regular expressions as values: sets of characters, one after the other, alternatives, repetitions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that no UTF-8 text has."""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, as ascending ranges (first, last) with gaps between them."""


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other; none is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of several; none of none, which no text matches."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    """A part from `least` to `most` times (None: any number)."""

    part: Node
    least: int
    most: int | None


Node: TypeAlias = Characters | Sequence | Either | Repeated
EMPTY, NEVER = Sequence(()), Either(())


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in any order, overlapping or not, as `Ranges`."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        elif first <= last:
            found.append((first, last))
    return tuple(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of `ranges` that are not among `others`."""
    for low, high in others:
        ranges = tuple(
            part
            for first, last in ranges
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        )
    return ranges


ANY: Ranges = without(((0, LAST_CHARACTER),), (SURROGATES,))


def characters(ranges: Iterable[tuple[int, int]]) -> Node:
    kept = without(merged(ranges), (SURROGATES,))
    return Characters(kept) if kept else NEVER


def text(value: str) -> Node:
    """Just this text."""
    return sequence(Characters(((ord(sign), ord(sign)),)) for sign in value)


def sequence(parts: Iterable[Node]) -> Node:
    kept = tuple(part for part in parts if part != EMPTY)
    if NEVER in kept:
        return NEVER
    return kept[0] if len(kept) == 1 else Sequence(kept)


def either(parts: Iterable[Node]) -> Node:
    kept = tuple(dict.fromkeys(part for part in parts if part != NEVER))
    return kept[0] if len(kept) == 1 else Either(kept)


def repeated(part: Node, least: int = 0, most: int | None = None) -> Node:
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NEVER:
        return NEVER if least else EMPTY
    return part if least == most == 1 else Repeated(part, least, most)


def optional(part: Node) -> Node:
    return repeated(part, 0, 1)
