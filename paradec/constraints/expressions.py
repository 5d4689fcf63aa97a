"""Regular expressions as values: character sets, sequences, alternatives, repetitions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, TypeAlias

LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that UTF-8 does not encode."""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, as ascending ranges (first, last) with gaps between them."""


@dataclass(frozen=True, eq=False)
class Characters:
    """One character of a set."""

    ranges: Ranges
    size: ClassVar[int] = 1


@dataclass(frozen=True, eq=False)
class Sequence:
    """Parts one after the other; none is the empty text."""

    parts: tuple[Node, ...]
    size: int = field(init=False, repr=False)
    """Number of character sets, choices and repetitions, with repeated parts counted each time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.size for part in self.parts))


@dataclass(frozen=True, eq=False)
class Either:
    """Alternatives; without any, no text matches."""

    parts: tuple[Node, ...]
    size: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(1 + part.size for part in self.parts))


@dataclass(frozen=True, eq=False)
class Repeated:
    """A part from `least` to `most` times (None: any number)."""

    part: Node
    least: int
    most: int | None
    size: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        copies = max(self.least, 1) if self.most is None else self.most
        object.__setattr__(self, "size", 1 + copies * (1 + self.part.size))


@dataclass(frozen=True, eq=False)
class Machine:
    """A finite automaton whose letters are expressions, with `separator` between two letters.

    State 0 is the start; with a separator no edge leads there.
    """

    edges: tuple[tuple[tuple[Node, int], ...], ...]
    """Of each state: letters and next states."""
    accept: tuple[bool, ...]
    separator: Node = Sequence(())
    size: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(1 + letter.size for edges in self.edges for letter, _ in edges))


@dataclass(frozen=True, eq=False)
class Letter:
    """A part that often occurs, none of whose texts begins another one: its automaton is made once, and copied."""

    part: Node
    size: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.part.size)


Node: TypeAlias = Characters | Sequence | Either | Repeated | Machine | Letter
"""Compared by identity: a part that occurs in several places is built once for all that follow it alike."""
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


@lru_cache(maxsize=4096)
def character(code: int) -> Node:
    return Characters(((code, code),))


def text(value: str) -> Node:
    """Just this text."""
    return sequence(character(ord(sign)) for sign in value)


def sequence(parts: Iterable[Node]) -> Node:
    nonempty = tuple(part for part in parts if part is not EMPTY)
    if NEVER in nonempty:
        return NEVER
    return nonempty[0] if len(nonempty) == 1 else Sequence(nonempty) if nonempty else EMPTY


def either(parts: Iterable[Node]) -> Node:
    branches = tuple(dict.fromkeys(part for part in parts if part is not NEVER))
    return branches[0] if len(branches) == 1 else Either(branches) if branches else NEVER


def repeated(part: Node, least: int = 0, most: int | None = None) -> Node:
    if most == 0 or part is EMPTY:
        return EMPTY
    if part is NEVER:
        return NEVER if least else EMPTY
    return part if least == most == 1 else Repeated(part, least, most)


def machine(edges: list[tuple[tuple[Node, int], ...]], accept: list[bool], separator: Node) -> Node:
    """A `Machine`; no text where no accepting state is reached."""
    reached, todo = {0}, [0]
    for state in todo:
        new = {target for _, target in edges[state]} - reached
        todo += new
        reached |= new
    return Machine(tuple(edges), tuple(accept), separator) if any(accept[state] for state in reached) else NEVER
