"""Deterministic finite automata (DFA) of expressions, over characters or over the bytes of UTF-8 texts.

The subset construction over an expression's positions gives an automaton over characters, which partition refinement
makes minimal. Only then do characters become bytes.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from paradec.constraints.expressions import (
    ANY,
    LAST_CHARACTER,
    MAX_DFA_STATES,
    NEVER,
    Characters,
    Machine,
    Node,
    Ranges,
    sequence,
    too_large,
)

MAX_WORK = 2**19
"""Maximum number of letters, positions and entries of position sets together; it bounds the time."""
END = 0
"""The position after an expression."""
State = TypeVar("State", bound=Hashable)
Positions: TypeAlias = tuple[int, ...]
Row: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ascending, disjoint ranges of letters, each with its next state: (low, high, next state)."""


@dataclass(frozen=True, eq=False)
class Dfa:
    """Automaton with states 0 (start) to S - 1, each of which leads to an accepting one. If S is 0, no text matches."""

    rows: list[Row]
    accept: list[bool]

    def accepts(self, letters: Iterable[int]) -> bool:
        state = 0 if self.rows else -1
        for letter in letters:
            if state < 0:
                return False
            state = next((target for low, high, target in self.rows[state] if low <= letter <= high), -1)
        return state >= 0 and self.accept[state]


def explore(
    start: State,
    moves: Callable[[State], Iterable[tuple[Any, Any, State]]],
    is_end: Callable[[State], bool],
    max_moves: int = 2**20,
) -> tuple[list[Any], list[bool]]:
    """Number the states that can be reached from `start`, in order of discovery.

    moves: returns a state's moves, as triples (low, high, next state).

    Returns the moves of each state with numbered next states, and whether each state is an end. Raises ValueError for
    more than `MAX_DFA_STATES` states or `max_moves` moves.
    """
    ids, todo, rows = {start: 0}, [start], list[tuple[tuple[Any, Any, int], ...]]()
    for state in todo:
        row = list[tuple[Any, Any, int]]()
        for low, high, target in moves(state):
            index = ids.get(target)
            if index is None:
                index = ids[target] = len(todo)
                todo.append(target)
            row.append((low, high, index))
        rows.append(tuple(row))
        max_moves -= len(row)
        if len(todo) > MAX_DFA_STATES or max_moves < 0:
            raise too_large()
    return rows, [is_end(state) for state in todo]


def join_ranges(moves: Iterable[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
    """Join adjacent ranges with equal targets; `moves` are ascending."""
    row, begin = list[tuple[int, int, Any]](), -1
    for low, high, target in moves:
        if low == begin and row[-1][2] == target:
            row[-1] = (row[-1][0], high, target)
        else:
            row.append((low, high, target))
        begin = high + 1
    return row


# ---- expressions -----------------------------------------------------------------------------------------------------


def to_dfa(node: Node, over_bytes: bool = False) -> Dfa:
    """Build the minimal automaton of an expression. ValueError: more than `MAX_DFA_STATES` or `MAX_WORK`."""
    graph, collects = _Positions(), gc.isenabled()
    gc.disable()  # it would scan many small tuples, none of them in a cycle
    try:
        start = graph.reach((graph.add(sequence((node,)), 0, END),))
        language = minimize(*explore(start, graph.moves, lambda positions: END in positions))
        return to_bytes(language) if over_bytes else language
    finally:
        if collects:
            gc.enable()


class _Positions:
    """Positions in an expression. Each is a triple: a `Machine`, its state, and the position after the machine."""

    def __init__(self) -> None:
        self.work = 0
        self._positions: list[tuple[Machine, int, int]] = [(Machine(((),), (True,)), 0, END)]
        self._ids: dict[tuple[Machine, int, int], int] = {}
        self._letters: dict[int, list[tuple[int, int, Positions]]] = {END: []}
        self._inner: dict[int, list[int]] = {END: []}
        self._reached: dict[Positions, Positions] = {}

    def add_work(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise too_large()

    def add(self, machine: Node, state: int, following: int) -> int:
        """Return the index of a position, new or known; `following` if the machine cannot read on."""
        if isinstance(machine, Characters):
            machine = Machine((((machine, 1),), ()), (False, True))
        if machine.accept[state] and not machine.edges[state]:
            return following
        position = (machine, state, following)
        if position not in self._ids:
            self._ids[position] = len(self._positions)
            self._positions.append(position)
        return self._ids[position]

    def reach(self, positions: Positions) -> Positions:
        """Find the positions that have letters, or are `END`, and can be reached without reading a letter."""
        if positions not in self._reached:
            stack, reached = [*positions], {*positions}
            while stack:
                new = [index for index in self._expand(stack.pop()) if index not in reached]
                reached.update(new)
                stack += new
            self.add_work(1 + len(reached))
            self._reached[positions] = tuple(sorted(i for i in reached if i == END or self._letters[i]))
        return self._reached[positions]

    def _expand(self, index: int) -> list[int]:
        """Record a position's letters. Returns the positions directly after it that need no letter."""
        if index not in self._inner:
            machine, state, following = self._positions[index]
            self.add_work(1 + len(machine.edges[state]))
            letters, inner = list[tuple[int, int, Positions]](), [following] if machine.accept[state] else []
            for letter, target in machine.edges[state]:
                position = self.add(machine, target, following)
                if isinstance(letter, Characters):
                    letters += [(low, high, (position,)) for low, high in letter.ranges]
                else:
                    inner.append(self.add(letter, 0, position))
            self._letters[index], self._inner[index] = self._split_overlaps(letters), inner
        return self._inner[index]

    def moves(self, positions: Positions) -> Iterator[tuple[int, int, Positions]]:
        letters = [self._letters[index] for index in positions]
        moves = letters[0] if len(letters) == 1 else self._split_overlaps([move for part in letters for move in part])
        self.add_work(len(positions) + len(moves))
        return ((low, high, self._reached.get(target) or self.reach(target)) for low, high, target in moves)

    def _split_overlaps(self, moves: list[tuple[int, int, Positions]]) -> list[tuple[int, int, Positions]]:
        """Split overlapping ranges into ascending disjoint ranges, each with the union of the positions after it."""
        moves.sort()
        if len(moves) < 2 or all(left[1] < right[0] for left, right in zip(moves, moves[1:], strict=False)):
            return moves
        cuts = sorted({cut for low, high, _ in moves for cut in (low, high + 1)})
        targets: list[set[int]] = [set() for _ in cuts]
        for low, high, target in moves:
            for index in range(bisect_left(cuts, low), bisect_left(cuts, high + 1)):
                targets[index].update(target)
                self.add_work(len(target))
        parts = zip(cuts, cuts[1:], targets, strict=False)
        return join_ranges((low, high - 1, tuple(sorted(ids))) for low, high, ids in parts if ids)


def to_bytes(language: Dfa) -> Dfa:
    """Convert an automaton over characters to one over UTF-8 bytes. A minimal automaton stays minimal."""

    def moves(state: Any) -> Any:
        if not isinstance(state, int):
            return state
        if not language.rows[state] or language.rows[state][-1][1] < 0x80:
            return language.rows[state]
        return _by_first((path, to) for low, high, to in language.rows[state] for path in _encode(low, high))

    return Dfa(*explore(0, moves, lambda state: isinstance(state, int) and language.accept[state]))


def _by_first(paths: Iterable[tuple[Any, Any]]) -> tuple[tuple[int, int, Any], ...]:
    """Group paths of byte ranges by their first byte. A state inside a character is the tuple of its next moves."""
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for (first, *rest), target in paths:
        groups.setdefault(first, []).append((rest, target))
    moves = ((*first, tails[0][1] if not tails[0][0] else _by_first(tails)) for first, tails in sorted(groups.items()))
    return tuple(join_ranges(moves))


@lru_cache(maxsize=2**14)
def _encode(first: int, last: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Encode the characters from `first` to `last` as sequences of byte ranges."""
    for bound in (0x7F, 0x7FF, 0xFFFF):
        if first <= bound < last:
            return _encode(first, bound) + _encode(bound + 1, last)
    first_bytes, last_bytes = chr(first).encode("utf-8", "surrogatepass"), chr(last).encode("utf-8", "surrogatepass")
    for index in range(1, len(first_bytes)):  # split until both ends share leading bytes and full ranges follow
        bits = (1 << (6 * index)) - 1
        if first & ~bits != last & ~bits:
            if first & bits:
                return _encode(first, first | bits) + _encode((first | bits) + 1, last)
            if last & bits != bits:
                return _encode(first, (last & ~bits) - 1) + _encode(last & ~bits, last)
    return (tuple(zip(first_bytes, last_bytes, strict=True)),)


@dataclass(frozen=True)
class ByteAutomaton:
    """Automaton over bytes with states 0 (start) to S - 1, each of which leads to an accepting one. S is 0 if no text
    matches.

    If a marker precedes the texts, states below `begin` read free bytes and the marker. The end of the marker leads to
    state `begin` - 1, which callers replace by `begin`, the start of the texts.
    """

    step: np.ndarray
    """[S, L] int32: the next state after each letter; -1: none."""
    letter_of: np.ndarray
    """[256] int32: the letter of each byte; bytes with equal moves in every state share a letter."""
    accept: np.ndarray
    """[S] bool: accepting states."""
    begin: int = 0

    def accepts(self, text: bytes) -> bool:
        state = 0 if len(self.accept) else -1
        for byte in text:
            if state < 0:
                return False
            state = int(self.step[state, self.letter_of[byte]])
            state += state == self.begin - 1 >= 0
        return state >= 0 and bool(self.accept[state])


def byte_automaton(node: Node, after: str | None = None) -> ByteAutomaton:
    """Build the minimal automaton over the bytes of an expression's texts. Raises ValueError as `to_dfa`.

    after: a marker. Free bytes up to the first marker then precede the texts (automaton of Knuth, Morris and Pratt).
    """
    language = to_dfa(node, over_bytes=True)
    moves = np.array([(s, *move) for s, row in enumerate(language.rows) for move in row], np.int64).reshape(-1, 4)
    source, low, high, target = moves.T
    byte_cuts = np.unique(np.concatenate(([0], low, high + 1)))
    byte_cuts = byte_cuts[byte_cuts < 256]
    letter_of = np.searchsorted(byte_cuts, np.arange(256), side="right") - 1
    first, sizes = letter_of[low], letter_of[high] - letter_of[low] + 1
    letters = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes - first, sizes)
    step = np.full((len(language.rows), len(byte_cuts)), -1, np.int32)
    step[np.repeat(source, sizes), letters] = np.repeat(target, sizes)
    columns = {column.tobytes(): index for index, column in reversed([*enumerate(step.T)])}
    distinct = sorted(columns.values())
    letter = np.array([distinct.index(columns[column.tobytes()]) for column in step.T])
    step, letter_of, accept = step[:, distinct], letter[letter_of].astype(np.int32), np.array(language.accept, bool)
    if after is None or not len(accept):
        return ByteAutomaton(step, letter_of, accept)
    marker = after.encode()
    pairs = np.stack((letter_of, [marker.find(byte) for byte in range(256)]))
    (old_letters, _), letter_of = np.unique(pairs, axis=1, return_inverse=True)
    letter_of, begin, fallback = letter_of.ravel().astype(np.int32), len(marker) + 1, 0
    free = np.zeros((begin, len(old_letters)), np.int32)
    for state, new_letter in enumerate(letter_of[[*marker]]):
        free[state] = free[fallback]
        fallback, free[state, new_letter] = int(free[fallback, new_letter]), state + 1
    free[-1] = -1
    step = np.concatenate((free, np.where(step < 0, -1, step + begin).astype(np.int32)[:, old_letters]))
    return ByteAutomaton(step, letter_of, np.append(np.zeros(begin, bool), accept), begin)


# ---- operations ------------------------------------------------------------------------------------------------------


def minimize(rows: list[Row], accept: list[bool]) -> Dfa:
    """Remove states that lead to no accepting one, and merge states that accept the same texts.

    Partition refinement (Hopcroft 1971). The first classes group states by the length of their shortest text, by
    acceptance, and by their lowest and highest letter. Then each class is split by its members' next classes, and
    again whenever a next class was split. The largest part keeps the number of the class.
    """
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for _, _, target in row:
            sources[target].append(state)
    states = [state for state, accepts in enumerate(accept) if accepts]
    shortest = dict.fromkeys(states, 0)
    for state in states:  # breadth first: `states` grows
        for source in sources[state]:
            if source not in shortest:
                shortest[source] = shortest[state] + 1
                states.append(source)
    if 0 not in shortest:
        return Dfa([], [])
    if len(states) < len(rows):
        rows = [tuple(move for move in row if move[2] in shortest) for row in rows]
    groups: dict[Any, set[int]] = {}
    for state, length in shortest.items():
        bounds = (rows[state][0][0], rows[state][-1][1]) if rows[state] else ()
        groups.setdefault((length, accept[state], bounds), set()).add(state)
    members, label = [*groups.values()], [-1] * len(rows)
    for index, group in enumerate(members):
        for state in group:
            label[state] = index
    changed = {state for group in members if len(group) > 1 for state in group}
    while changed:
        dirty: dict[int, list[int]] = {}
        for state in changed:
            dirty.setdefault(label[state], []).append(state)
        changed = set()
        for index, dirty_states in dirty.items():
            parts: dict[Any, set[int]] = {}
            for state in dirty_states:
                signature = list[int]()
                for low, high, target in rows[state]:
                    following = label[target]
                    if signature and signature[-1] == following and signature[-2] == low:
                        signature[-2] = high + 1
                    else:
                        signature += (low, high + 1, following)
                parts.setdefault(tuple(signature), set()).add(state)
            members[index].difference_update(dirty_states)
            pieces = sorted((part for part in (*parts.values(), members[index]) if part), key=len)
            members[index] = pieces.pop()
            for piece in pieces:
                for state in piece:
                    label[state] = len(members)
                    changed.update(sources[state])
                members.append(piece)
        changed = {state for state in changed if label[state] >= 0 and len(members[label[state]]) > 1}
    if len(members) == len(rows):
        return Dfa(rows, accept)
    first = sorted(map(min, members))
    number = {label[state]: index for index, state in enumerate(first)}
    merged = [tuple(join_ranges((low, high, number[label[to]]) for low, high, to in rows[state])) for state in first]
    return Dfa(merged, [accept[state] for state in first])


@lru_cache(maxsize=64)
def intersect(first: Dfa, second: Dfa) -> Dfa:
    """Texts that are in both languages."""
    if first is second or not first.rows:
        return first
    if not second.rows:
        return second

    def moves(states: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        left, right = first.rows[states[0]], second.rows[states[1]]
        i = j = 0
        while i < len(left) and j < len(right):
            low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
            if low <= high:
                yield low, high, (left[i][2], right[j][2])
            if left[i][1] <= right[j][1]:
                i += 1
            else:
                j += 1

    return minimize(*explore((0, 0), moves, lambda pair: first.accept[pair[0]] and second.accept[pair[1]], 2**17))


@lru_cache(maxsize=64)
def complement(language: Dfa) -> Dfa:
    """All texts that are not in the language."""
    sink, rows = max(len(language.rows), 1), list[Row]()
    for row in (*(language.rows or [()]), ()):
        full, begin = list[tuple[int, int, int]](), 0
        for low, high, target in (*row, (LAST_CHARACTER + 1, 0, 0)):
            full += [(max(a, begin), min(b, low - 1), sink) for a, b in ANY if max(a, begin) <= min(b, low - 1)]
            if low <= LAST_CHARACTER:
                full.append((low, high, target))
                begin = high + 1
        rows.append(tuple(full))
    return minimize(rows, [*(not accepts for accepts in language.accept or [False]), True])


def difference(first: Dfa, second: Dfa) -> Dfa:
    """Texts of the first language that are not in the second."""
    return intersect(first, complement(second))


def to_node(language: Dfa, letter: Callable[[Ranges], Node] = Characters) -> Node:
    """Convert an automaton to an expression; `letter` converts its sets of characters."""
    if not language.rows:
        return NEVER
    edges = []
    for row in language.rows:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in row:
            ranges.setdefault(target, []).append((low, high))
        edges.append(tuple((letter(tuple(parts)), target) for target, parts in ranges.items()))
    return Machine(tuple(edges), tuple(language.accept))
