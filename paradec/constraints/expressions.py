"""Regular expressions as values: character sets, sequences, alternatives, repetitions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

MAX_PARTS = 2**18
"""Maximum number of character sets, choices and repetitions, with repeated parts counted each time. It bounds the
automaton's states."""
LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that UTF-8 does not encode."""
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
    """Alternatives; without any, no text matches."""

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
        """Copies of the part in an automaton; without a limit the last one loops."""
        return max(self.least, 1) if self.most is None else self.most


Node: TypeAlias = Characters | Sequence | Either | Repeated
EMPTY, NEVER = Sequence(()), Either(())


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and merge overlapping ones."""
    disjoint: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if disjoint and first <= disjoint[-1][1] + 1:
            disjoint[-1] = (disjoint[-1][0], max(last, disjoint[-1][1]))
        elif first <= last:
            disjoint.append((first, last))
    return tuple(disjoint)


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The characters of `ranges` that are not among `others`."""
    for low, high in removed:
        ranges = tuple(
            part
            for first, last in ranges
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        )
    return ranges


ANY: Ranges = without(((0, LAST_CHARACTER),), (SURROGATES,))


def characters(ranges: Iterable[tuple[int, int]]) -> Node:
    valid = without(merged(ranges), (SURROGATES,))
    return Characters(valid) if valid else NEVER


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
    """Collect parts. Raises ValueError above `MAX_PARTS`, before it makes the rest."""
    collected, size = list[Node](), 0
    for part in parts:
        size += part.size
        if size > MAX_PARTS:
            raise ValueError(f"the constraint has more than {MAX_PARTS} parts")
        collected.append(part)
    return tuple(collected)


def repeated(part: Node, least: int = 0, most: int | None = None, between: Node = EMPTY) -> Node:
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NEVER:
        return NEVER if least else EMPTY
    return part if least == most == 1 else Repeated(part, least, most, between)


def optional(part: Node) -> Node:
    return repeated(part, 0, 1)
