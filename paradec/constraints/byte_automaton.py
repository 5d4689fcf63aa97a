"""Minimal deterministic automata of expressions, over the bytes of UTF-8 texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paradec.constraints.expressions import MAX_PARTS, Characters, Either, Node, Ranges, Repeated, Sequence

MOST_STATES = 2**13
"""Maximum number of states of an automaton."""
MAX_WORK = 2**21
"""Maximum number of entries of state sets in the subset construction; bounds time and memory."""
MOST_COMPARED = 3 * 10**7
"""Maximum number of compared entries in the minimisation; larger automata keep some equivalent states."""


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
        parts = _Nfa()
        last = parts.add(node, parts.new())
    except RecursionError:
        raise ValueError("the constraint is nested too deeply") from None
    letter_of, marks = _byte_classes(parts)
    step, accept = _determinize(parts, last, letter_of, marks)
    return _minimize(step, letter_of, accept)


class _Nfa:
    """A nondeterministic automaton: `free` are its empty moves, `moves` (first byte, last byte, target)."""

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.moves: list[list[tuple[int, int, int]]] = []

    def new(self) -> int:
        if len(self.free) >= MAX_PARTS:
            raise ValueError(f"the constraint needs an automaton of more than {MOST_STATES} states")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def add(self, node: Node, state: int) -> int:
        """Add an expression from `state` on; returns its end state."""
        match node:
            case Characters(ranges):
                return self._characters(ranges, state)
            case Sequence(parts):
                for part in parts:
                    state = self.add(part, state)
                return state
            case Either(parts):
                end = self.new()
                for part in parts:
                    first = self.new()
                    self.free[state].append(first)
                    self.free[self.add(part, first)].append(end)
                return end
            case Repeated(part, least, most, between):
                end = first = self.new()
                if not least:
                    self.free[state].append(end)
                for count in range(1, node.copies + 1):
                    if count > 1:
                        state = self.add(between, state)
                    first = self.new()
                    self.free[state].append(first)
                    state = self.add(part, first)
                    if count >= least:
                        self.free[state].append(end)
                if most is None:
                    self.free[self.add(between, state)].append(first)
                return end

    def _characters(self, ranges: Ranges, state: int) -> int:
        end, state_by_suffix = self.new(), dict[tuple[tuple[int, int], ...], int]()
        for first, last in ranges:
            for path in _utf8(first, last):
                # equal suffixes share their states
                target = end
                for index in range(len(path) - 1, 0, -1):
                    suffix = path[index:]
                    if suffix not in state_by_suffix:
                        state_by_suffix[suffix] = self.new()
                        self.moves[state_by_suffix[suffix]].append((*path[index], target))
                    target = state_by_suffix[suffix]
                self.moves[state].append((*path[0], target))
        return end


def _utf8(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Split the characters from first to last into sequences of byte ranges."""
    for bound in (0x7F, 0x7FF, 0xFFFF):
        if first <= bound < last:
            yield from _utf8(first, bound)
            yield from _utf8(bound + 1, last)
            return
    first_bytes, last_bytes = chr(first).encode("utf-8", "surrogatepass"), chr(last).encode("utf-8", "surrogatepass")
    for index in range(1, len(first_bytes)):  # up to here both share their bytes, or whole ranges follow
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
    yield tuple(zip(first_bytes, last_bytes, strict=True))


def _byte_classes(parts: _Nfa) -> tuple[np.ndarray, np.ndarray]:
    """Group bytes that no move distinguishes: [256] int32 letters, and [L] int64 the first byte of each."""
    cuts = {0} | {cut for moves in parts.moves for low, high, _ in moves for cut in (low, high + 1)}
    marks = np.array(sorted(cut for cut in cuts if cut < 256))
    return (np.searchsorted(marks, np.arange(256), side="right") - 1).astype(np.int32), marks


def _determinize(parts: _Nfa, last: int, letter_of: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Subset construction."""
    closures: dict[int, frozenset[int]] = {}
    state_ids, work = dict[frozenset[int], int](), 0

    def count(entries: int) -> None:
        nonlocal work
        work += entries
        if work > MAX_WORK or len(state_ids) > MOST_STATES:
            raise ValueError(f"the constraint needs an automaton of more than {MOST_STATES} states")

    def closure(state: int) -> frozenset[int]:
        if state not in closures:
            reachable, stack = {state}, [state]
            while stack:
                for successor in parts.free[stack.pop()]:
                    if successor not in reachable:
                        reachable.add(successor)
                        stack.append(successor)
            count(len(reachable))
            closures[state] = frozenset(member for member in reachable if parts.moves[member] or member == last)
        return closures[state]

    letters, start = letter_of.tolist(), closure(0)
    state_ids[start] = 0
    todo, rows = [start], list[dict[int, int]]()
    for states in todo:
        reached: dict[int, set[int]] = {}
        for state in states:
            for low, high, to in parts.moves[state]:
                targets = closure(to)
                for letter in range(letters[low], letters[high] + 1):
                    reached.setdefault(letter, set()).update(targets)
                    count(1 + len(targets))
        row = {}
        for letter, target_set in reached.items():
            key = frozenset(target_set)
            if key not in state_ids:
                state_ids[key] = len(state_ids)
                todo.append(key)
            row[letter] = state_ids[key]
        rows.append(row)
        count(0)
    step = np.full((len(rows), len(marks)), -1, np.int32)
    for state, row in enumerate(rows):
        step[state, list(row)] = list(row.values())
    return step, np.array([last in states for states in todo])


def _minimize(step: np.ndarray, letter_of: np.ndarray, accept: np.ndarray) -> ByteAutomaton:
    """Remove dead states and merge equivalent ones."""
    alive = accept.copy()
    while True:
        grown = alive | (alive[step] & (step >= 0)).any(1)
        if (grown == alive).all():
            break
        alive = grown
    if not alive[0]:
        return ByteAutomaton(np.zeros((0, step.shape[1]), np.int32), letter_of, np.zeros(0, bool))
    label = _equivalence_classes(step, np.where(alive, 1 + accept, 0))
    labels, first = np.unique(np.where(alive, label, -1), return_index=True)
    labels, first = labels[labels >= 0], first[labels >= 0]
    # the start state first, the others in order of discovery
    order = np.argsort(first)
    state_ids = np.full(int(label.max()) + 1, -1, np.int32)
    state_ids[labels[order]] = np.arange(len(labels), dtype=np.int32)
    first = first[order]
    following = step[first]
    new_step = np.where((following >= 0) & alive[following], state_ids[label[following]], -1).astype(np.int32)
    columns, letter = np.unique(new_step, axis=1, return_inverse=True)
    return ByteAutomaton(columns, letter.ravel()[letter_of].astype(np.int32), accept[first])


def _equivalence_classes(step: np.ndarray, label: np.ndarray) -> np.ndarray:
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
            is_exact = (following == following[first[finer]]).all() and (label == label[first[finer]]).all()
            return finer if is_exact else np.arange(len(step))
        label, count = finer, len(first)
    return np.arange(len(step))
