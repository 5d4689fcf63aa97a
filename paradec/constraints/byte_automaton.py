"""Expressions become minimal deterministic automata over the bytes of UTF-8 texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paradec.constraints.expressions import MAX_PARTS, Characters, Either, Node, Ranges, Repeated, Sequence

MOST_STATES = 2**13
"""States that an automaton may have."""
MAX_WORK = 2**21
"""Entries of sets of states that may be looked at on the way; it bounds time and memory."""
MOST_COMPARED = 3 * 10**7
"""Entries that may be compared to find equal states; a larger automaton keeps some that are equal."""


@dataclass(frozen=True)
class ByteAutomaton:
    """States 0 (where texts begin) to S - 1, of which each leads to an accepting one; S is 0 where no text matches."""

    step: np.ndarray
    """[S, L] int32: the next state after each letter, -1 where there is none."""
    letter_of: np.ndarray
    """[256] int32: the letter of each byte; bytes that no state tells apart are one letter."""
    accept: np.ndarray
    """[S] bool."""


def byte_automaton(node: Node) -> ByteAutomaton:
    """Build the minimal automaton of an expression. Raises ValueError for more than `MOST_STATES` states."""
    try:
        parts = _Parts()
        last = parts.add(node, parts.new())
    except RecursionError:
        raise ValueError("the constraint is nested too deeply") from None
    letter_of, marks = _letters(parts)
    step, accept = _subsets(parts, last, letter_of, marks)
    return _minimal(step, letter_of, accept)


class _Parts:
    """A nondeterministic automaton: moves by nothing, and by a byte of a range."""

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.moves: list[list[tuple[int, int, int]]] = []

    def new(self) -> int:
        if len(self.free) >= MAX_PARTS:
            raise ValueError(f"the constraint needs an automaton of more than {MOST_STATES} states")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def add(self, node: Node, begin: int) -> int:
        """Let the expression be read from a state on; returns where it ends."""
        match node:
            case Characters(ranges):
                return self._characters(ranges, begin)
            case Sequence(parts):
                for part in parts:
                    begin = self.add(part, begin)
                return begin
            case Either(parts):
                end = self.new()
                for part in parts:
                    first = self.new()
                    self.free[begin].append(first)
                    self.free[self.add(part, first)].append(end)
                return end
            case Repeated(part, least, most, between):
                end = first = self.new()
                if not least:
                    self.free[begin].append(end)
                for count in range(1, node.copies + 1):
                    if count > 1:
                        begin = self.add(between, begin)
                    first = self.new()
                    self.free[begin].append(first)
                    begin = self.add(part, first)
                    if count >= least:
                        self.free[begin].append(end)
                if most is None:
                    self.free[self.add(between, begin)].append(first)
                return end

    def _characters(self, ranges: Ranges, begin: int) -> int:
        end, known = self.new(), dict[tuple[tuple[int, int], ...], int]()
        for first, last in ranges:
            for path in _utf8(first, last):
                # what is left to read leads to one state, however it began
                at = end
                for index in range(len(path) - 1, 0, -1):
                    rest = path[index:]
                    if rest not in known:
                        known[rest] = self.new()
                        self.moves[known[rest]].append((*path[index], at))
                    at = known[rest]
                self.moves[begin].append((*path[0], at))
        return end


def _utf8(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The characters from first to last as sequences of ranges of bytes."""
    for bound in (0x7F, 0x7FF, 0xFFFF):
        if first <= bound < last:
            yield from _utf8(first, bound)
            yield from _utf8(bound + 1, last)
            return
    low, high = chr(first).encode("utf-8", "surrogatepass"), chr(last).encode("utf-8", "surrogatepass")
    for index in range(1, len(low)):  # up to here both share their bytes, or whole ranges follow
        bits = (1 << (6 * index)) - 1
        if first & ~bits != last & ~bits:
            if first & bits:
                yield from _utf8(first, first | bits)
                yield from _utf8((first | bits) + 1, last)
                return
            if last & bits != bits:
                yield from _utf8(first, (last & ~bits) - 1)
                yield from _utf8(last & ~bits, last)
                return
    yield tuple(zip(low, high, strict=True))


def _letters(parts: _Parts) -> tuple[np.ndarray, np.ndarray]:
    """[256] int32: letters of bytes that no move tells apart; and [L] int64: the first byte of each."""
    cuts = {0} | {cut for moves in parts.moves for low, high, _ in moves for cut in (low, high + 1)}
    marks = np.array(sorted(cut for cut in cuts if cut < 256))
    return (np.searchsorted(marks, np.arange(256), side="right") - 1).astype(np.int32), marks


def _subsets(parts: _Parts, last: int, letter_of: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sets of states that are reached together become states."""
    closures: dict[int, frozenset[int]] = {}
    number, work = dict[frozenset[int], int](), 0

    def count(more: int) -> None:
        nonlocal work
        work += more
        if work > MAX_WORK or len(number) > MOST_STATES:
            raise ValueError(f"the constraint needs an automaton of more than {MOST_STATES} states")

    def closure(state: int) -> frozenset[int]:
        if state not in closures:
            found, left = {state}, [state]
            while left:
                for other in parts.free[left.pop()]:
                    if other not in found:
                        found.add(other)
                        left.append(other)
            count(len(found))
            closures[state] = frozenset(one for one in found if parts.moves[one] or one == last)
        return closures[state]

    letters, begin = letter_of.tolist(), closure(0)
    number[begin] = 0
    todo, rows = [begin], list[dict[int, int]]()
    for states in todo:
        reached: dict[int, set[int]] = {}
        for state in states:
            for low, high, to in parts.moves[state]:
                ahead = closure(to)
                for letter in range(letters[low], letters[high] + 1):
                    reached.setdefault(letter, set()).update(ahead)
                    count(1 + len(ahead))
        row = {}
        for letter, found in reached.items():
            key = frozenset(found)
            if key not in number:
                number[key] = len(number)
                todo.append(key)
            row[letter] = number[key]
        rows.append(row)
        count(0)
    step = np.full((len(rows), len(marks)), -1, np.int32)
    for state, row in enumerate(rows):
        step[state, list(row)] = list(row.values())
    return step, np.array([last in states for states in todo])


def _minimal(step: np.ndarray, letter_of: np.ndarray, accept: np.ndarray) -> ByteAutomaton:
    """Without states that lead nowhere, and without equal ones."""
    alive = accept.copy()
    while True:
        grown = alive | (alive[step] & (step >= 0)).any(1)
        if (grown == alive).all():
            break
        alive = grown
    if not alive[0]:
        return ByteAutomaton(np.zeros((0, step.shape[1]), np.int32), letter_of, np.zeros(0, bool))
    label = _equal(step, np.where(alive, 1 + accept, 0))
    kept, first = np.unique(np.where(alive, label, -1), return_index=True)
    kept, first = kept[kept >= 0], first[kept >= 0]
    # the beginning first, the others as they were found
    order = np.argsort(first)
    number = np.full(int(label.max()) + 1, -1, np.int32)
    number[kept[order]] = np.arange(len(kept), dtype=np.int32)
    first = first[order]
    following = step[first]
    found_step = np.where((following >= 0) & alive[following], number[label[following]], -1).astype(np.int32)
    columns, letter = np.unique(found_step, axis=1, return_inverse=True)
    return ByteAutomaton(columns, letter.ravel()[letter_of].astype(np.int32), accept[first])


def _equal(step: np.ndarray, label: np.ndarray) -> np.ndarray:
    """[S] int64: the number of the class of each state, where states of one class have one `label` [S] and lead to the
    same classes; every state has its own where finding that out takes too long."""
    weights = np.random.default_rng(0).integers(1, 2**63, step.shape[1] + 1, np.uint64) | np.uint64(1)
    count = len(np.unique(label))
    for _ in range(MOST_COMPARED // step.size):
        following = np.where(step >= 0, label[step] + 1, 0)
        sums = following.astype(np.uint64) @ weights[:-1] + label.astype(np.uint64) * weights[-1]
        first, finer = np.unique(sums, return_index=True, return_inverse=True)[1:]
        if len(first) == count:
            # rows of one sum are nearly always equal: here they are
            same = (following == following[first[finer]]).all() and (label == label[first[finer]]).all()
            return finer if same else np.arange(len(step))
        label, count = finer, len(first)
    return np.arange(len(step))
