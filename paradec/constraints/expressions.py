"""Regular expressions as values: sets of characters, one after the other, alternatives, repetitions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

MAX_PARTS = 2**18
"""Sets of characters, choices and repetitions that an expression may have, a repeated part counted as often as it is
repeated at most. It bounds the states of the automaton that is built from it."""
LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that no UTF-8 text has."""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, as ascending ranges (first, last) with gaps between them."""


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges
    size: ClassVar[int] = 1


def _set_size(node: Node, size: int) -> None:
    """Raise ValueError for too many parts."""
    if size > MAX_PARTS:
        raise ValueError(f"the constraint has more than {MAX_PARTS} parts")
    object.__setattr__(node, "size", size)


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other; none is the empty text."""

    parts: tuple[Node, ...]
    size: int = field(init=False, compare=False, repr=False)
    """See `MAX_PARTS`."""

    def __post_init__(self) -> None:
        _set_size(self, sum(part.size for part in self.parts))


@dataclass(frozen=True)
class Either:
    """One of several; none of none, which no text matches."""

    parts: tuple[Node, ...]
    size: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_size(self, 1 + sum(1 + part.size for part in self.parts))


@dataclass(frozen=True)
class Repeated:
    """A part from `least` to `most` times (None: any number), with `between` between two of them."""

    part: Node
    least: int
    most: int | None
    between: Node = Sequence(())
    size: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _set_size(self, 1 + self.copies * (1 + self.part.size))

    @property
    def copies(self) -> int:
        """How often the part is in an automaton: the last of them repeats where there is no limit."""
        return max(self.least, 1) if self.most is None else self.most


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
    nonempty = _bounded(part for part in parts if part != EMPTY)
    if NEVER in nonempty:
        return NEVER
    return nonempty[0] if len(nonempty) == 1 else Sequence(nonempty)


def either(parts: Iterable[Node]) -> Node:
    branches = _bounded(part for part in parts if part != NEVER)
    return branches[0] if len(branches) == 1 else Either(branches)


def _bounded(parts: Iterable[Node]) -> tuple[Node, ...]:
    """The parts; no more of them are made than an expression may have."""
    found, size = list[Node](), 0
    for part in parts:
        size += part.size
        if size > MAX_PARTS:
            raise ValueError(f"the constraint has more than {MAX_PARTS} parts")
        found.append(part)
    return tuple(found)


def repeated(part: Node, least: int = 0, most: int | None = None, between: Node = EMPTY) -> Node:
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NEVER:
        return NEVER if least else EMPTY
    return part if least == most == 1 else Repeated(part, least, most, between)


def optional(part: Node) -> Node:
    return repeated(part, 0, 1)
