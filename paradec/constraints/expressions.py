"""Regular expressions as values: sets of characters, and automata whose letters are expressions."""

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
    """Expression for one character out of a set."""

    ranges: Ranges
    size: ClassVar[int] = 1


@dataclass(frozen=True, eq=False)
class Machine:
    """A finite automaton whose letters are expressions; state 0 is the start."""

    edges: tuple[tuple[tuple[Node, int], ...], ...]
    """For each state, its edges: a letter and a next state."""
    accept: tuple[bool, ...]
    size: int = field(init=False, repr=False)
    """Estimated number of automaton states; a letter that leads to the same state from several states counts once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(letter.size for letter, _ in {edge for row in self.edges for edge in row}))


Node: TypeAlias = Characters | Machine
"""Nodes are compared by identity."""
EMPTY, NEVER = Machine(((),), (True,)), Machine(((),), (False,))
MAX_DFA_STATES = 2**16
"""Maximum number of states of an automaton. It bounds the memory."""


def too_large() -> ValueError:
    return ValueError(f"the constraint needs an automaton of more than {MAX_DFA_STATES} states: give a smaller one")


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges, and merge those that overlap or touch."""
    disjoint: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if disjoint and first <= disjoint[-1][1] + 1:
            disjoint[-1] = (disjoint[-1][0], max(last, disjoint[-1][1]))
        elif first <= last:
            disjoint.append((first, last))
    return tuple(disjoint)


def subtract_ranges(ranges: Ranges, removed: Ranges) -> Ranges:
    """The characters of `ranges` that are not in `removed`."""
    for low, high in removed:
        ranges = tuple(
            part
            for first, last in ranges
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        )
    return ranges


ANY: Ranges = subtract_ranges(((0, LAST_CHARACTER),), (SURROGATES,))


def characters(ranges: Iterable[tuple[int, int]]) -> Node:
    valid = subtract_ranges(merge_ranges(ranges), (SURROGATES,))
    return Characters(valid) if valid else NEVER


@lru_cache(maxsize=4096)
def character(code: int) -> Node:
    return Characters(((code, code),))


def text(value: str) -> Node:
    """Exactly this text."""
    return sequence(character(ord(char)) for char in value)


def sequence(parts: Iterable[Node]) -> Node:
    """Join parts one after the other; without parts, the empty text."""
    nonempty = [part for part in parts if part is not EMPTY]
    if NEVER in nonempty:
        return NEVER
    return nonempty[0] if len(nonempty) == 1 else chain(nonempty, len(nonempty))


def either(parts: Iterable[Node]) -> Node:
    """Alternatives; without parts, no text matches."""
    branches = [*dict.fromkeys(part for part in parts if part is not NEVER)]
    if len(branches) <= 1:
        return branches[0] if branches else NEVER
    return Machine((tuple((branch, 1) for branch in branches), ()), (False, True))


def repeat(part: Node, min_count: int = 0, max_count: int | None = None) -> Node:
    """Repeat a part `min_count` to `max_count` times (None: no limit). ValueError: a count above `MAX_DFA_STATES`."""
    if max_count == 0 or part is EMPTY:
        return EMPTY
    if part is NEVER:
        return NEVER if min_count else EMPTY
    if max(min_count, max_count or 0) > MAX_DFA_STATES:
        raise too_large()
    if max_count is not None:
        return part if min_count == max_count == 1 else chain([part] * max_count, min_count)
    edges = (*(((part, state + 1),) for state in range(min_count)), ((part, min_count),))
    return Machine(edges, tuple(state == min_count for state in range(min_count + 1)))


def chain(parts: list[Node], min_count: int) -> Node:
    """Join the first `n` parts in order, where `n` may be any number from `min_count` to all."""
    if not parts:
        return EMPTY
    edges = (*(((part, index + 1),) for index, part in enumerate(parts)), ())
    return Machine(edges, tuple(index >= min_count for index in range(len(edges))))
