"""Deterministic automata of expressions, over characters or over the bytes of UTF-8 texts.

A nondeterministic automaton is built from its end, with equal states shared (hash-consing), then made deterministic
by the subset construction and minimal by partition refinement.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from paradec.constraints.expressions import (
    ANY,
    EMPTY,
    LAST_CHARACTER,
    NEVER,
    Characters,
    Either,
    Letter,
    Machine,
    Node,
    Ranges,
    Repeated,
    Sequence,
)

MOST_STATES = 2**16
"""Maximum number of states: bounds the memory, with `MAX_WORK`."""
MAX_WORK = 2**19
"""Maximum number of parts that are built, and of entries of state sets; bounds time."""
ACCEPT = 0
"""The state that accepts, without moves."""
Front: TypeAlias = tuple[int, ...]
"""States in ascending order, in any of which an automaton may be."""
Moves: TypeAlias = tuple[tuple[int, int, Front], ...]
"""First letter, last letter, next states."""
Row: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ascending, disjoint ranges of letters and their next states."""


def too_large() -> ValueError:
    return ValueError(f"the constraint needs an automaton of more than {MOST_STATES} states: give a smaller one")


@dataclass(frozen=True, eq=False)
class Dfa:
    """States 0 (start) to S - 1, of which each leads to an accepting one; without states, no text matches."""

    rows: list[Row]
    accept: list[bool]

    def accepts(self, letters: Iterable[int]) -> bool:
        state = 0 if self.rows else -1
        for letter in letters:
            if state < 0:
                return False
            state = next((target for low, high, target in self.rows[state] if low <= letter <= high), -1)
        return state >= 0 and self.accept[state]


def to_dfa(node: Node, over_bytes: bool = False) -> Dfa:
    """Build the minimal automaton of an expression. Raises ValueError for more than `MOST_STATES` states."""
    try:
        graph = _Graph(over_bytes)
        front = graph.build(node, (ACCEPT,))
    except RecursionError:
        raise ValueError("the constraint is nested too deeply") from None
    return minimize(*_determinize(graph, front))


class _Graph:
    """A nondeterministic automaton over bytes or characters."""

    def __init__(self, over_bytes: bool) -> None:
        self.over_bytes = over_bytes
        self.moves: list[Moves] = [()]
        self.loops: dict[int, Front] = {}
        """States that stand for a front."""
        self.work = 0
        self._ids: dict[Moves, int] = {}
        self._built: dict[tuple[Node, Front], Front] = {}

    def count(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK or len(self.moves) > 2 * MOST_STATES:
            raise too_large()

    def state(self, moves: Moves) -> int:
        state = self._ids.get(moves)
        if state is None:
            state = self._ids[moves] = len(self.moves)
            self.moves.append(moves)
        return state

    def build(self, node: Node, then: Front) -> Front:
        """The front before an expression that `then` follows."""
        front = self._built.get((node, then))
        if front is None:
            self.count(1 + len(then))
            front = self._built[node, then] = self._build(node, then)
        return front

    def _build(self, node: Node, then: Front) -> Front:
        match node:
            case Characters(ranges):
                if not self.over_bytes:
                    return (self.state(tuple((low, high, then) for low, high in ranges)),)
                return (self._instantiate(_utf8_states(ranges), then),)
            case Letter(part):
                return (self._instantiate(_letter_states(node), then),) if self.over_bytes else self.build(part, then)
            case Sequence(parts):
                for part in reversed(parts):
                    then = self.build(part, then)
                return then
            case Either(parts):
                return join(self.build(part, then) for part in parts)
            case Repeated(part, least, None):
                loop = self._reserve()
                self.loops[loop] = join((then, self.build(part, (loop,))))
                then = (loop,)
                for _ in range(least):
                    then = self.build(part, then)
                return then
            case Repeated(part, least, int(most)):
                end = then
                for count in range(most - 1, -1, -1):
                    then = self.build(part, then)
                    if count >= least:
                        then = join((end, then))
                    self.count(len(then))
                return then
            case Machine():
                return self._build_machine(node, then)
        raise AssertionError(node)

    def _build_machine(self, node: Machine, then: Front) -> Front:
        size = len(node.edges)
        fronts, loops = dict[int, Front](), dict[int, int]()
        for state in range(size - 1, -1, -1):
            parts = list[Front]()
            for letter, target in node.edges[state]:
                if target not in fronts and target not in loops:
                    loops[target] = self._reserve()
                # one front for a state, so that what leads there is built once
                parts.append(self.build(letter, (loops[target],) if target in loops else fronts[target]))
            front = join(parts)
            self.count(len(front))
            if state and front and node.separator is not EMPTY:
                front = self.build(node.separator, front)
            fronts[state] = join((then, front)) if node.accept[state] else front
            if state in loops:
                self.loops[loops[state]] = fronts[state]
        return fronts[0]

    def _reserve(self) -> int:
        self.moves.append(())
        return len(self.moves) - 1

    def _instantiate(self, states: tuple[tuple[tuple[int, int, int], ...], ...], then: Front) -> int:
        """The first of states that each move to earlier ones, or (-1) to `then`."""
        fronts = list[Front]()
        for moves in states:
            state = self.state(
                tuple([(low, high, then if target < 0 else fronts[target]) for low, high, target in moves])
            )
            fronts.append((state,))
        return fronts[-1][0]

    def closure(self, front: Front) -> Front:
        """The states with moves, and the accepting one, of a front."""
        if self.loops.keys().isdisjoint(front):
            return front
        reached, stack = set(front), [*front]
        while stack:
            for state in self.loops.get(stack.pop(), ()):
                if state not in reached:
                    reached.add(state)
                    stack.append(state)
        self.count(len(reached))
        return tuple(sorted(state for state in reached if state not in self.loops))


def join(fronts: Iterable[Front]) -> Front:
    nonempty = [front for front in fronts if front]
    if len(nonempty) <= 1:
        return nonempty[0] if nonempty else ()
    return tuple(sorted({state for front in nonempty for state in front}))


@lru_cache(maxsize=1024)
def _utf8_states(ranges: Ranges) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """States that read the bytes of characters: moves to earlier states, or (-1) to the end."""
    states: dict[tuple[tuple[int, int, int], ...], int] = {}

    def add(paths: list[tuple[tuple[int, int], ...]]) -> int:
        groups: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = {}
        for path in paths:
            groups.setdefault(path[0], []).append(path[1:])
        moves = tuple((*first, add(rest) if rest[0] else -1) for first, rest in sorted(groups.items()))
        return states.setdefault(moves, len(states))

    add([path for low, high in ranges for path in _utf8(low, high)])
    return tuple(states)


@lru_cache(maxsize=1024)
def _letter_states(letter: Letter) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """The states of a letter over bytes, as `_utf8_states` has them."""
    language, states = to_dfa(letter.part, over_bytes=True), dict[int, int]()
    moves = list[tuple[tuple[int, int, int], ...]]()

    def add(state: int) -> int:
        if language.accept[state]:
            return -1
        if state not in states:
            moves.append(tuple((low, high, add(target)) for low, high, target in language.rows[state]))
            states[state] = len(moves) - 1
        return states[state]

    add(0)
    return tuple(moves)


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


def _determinize(graph: _Graph, front: Front) -> tuple[list[Row], list[bool]]:
    """Subset construction."""
    start = graph.closure(front)
    ids, todo, rows = {start: 0}, [start], list[Row]()
    closures: dict[Front, int] = {}
    for states in todo:
        moves = [*graph.moves[states[0]]] if len(states) == 1 else _disjoint(graph, states)
        row = list[tuple[int, int, int]]()
        graph.count(len(moves) + len(states))
        for low, high, target in moves:
            state = closures.get(target)
            if state is None:
                closed = graph.closure(target)
                state = ids.get(closed)
                if state is None:
                    state = ids[closed] = len(todo)
                    todo.append(closed)
                closures[target] = state
            if row and row[-1][2] == state and row[-1][1] == low - 1:
                row[-1] = (row[-1][0], high, state)
            else:
                row.append((low, high, state))
        rows.append(tuple(row))
        if len(todo) > MOST_STATES:
            raise too_large()
    return rows, [ACCEPT in states for states in todo]


def _disjoint(graph: _Graph, states: Front) -> list[tuple[int, int, Front]]:
    """The moves of several states, with those of one letter joined."""
    moves = sorted(move for state in states for move in graph.moves[state])
    if all(left[1] < right[0] for left, right in zip(moves, moves[1:], strict=False)):
        return moves
    cuts = sorted({cut for low, high, _ in moves for cut in (low, high + 1)})
    targets: list[list[Front]] = [[] for _ in cuts]
    for low, high, target in moves:
        for index in range(bisect_left(cuts, low), bisect_left(cuts, high + 1)):
            targets[index].append(target)
            graph.count(len(target))
    return [
        (cut, after - 1, join(fronts)) for cut, after, fronts in zip(cuts, cuts[1:], targets, strict=False) if fronts
    ]


def minimize(rows: list[Row], accept: list[bool]) -> Dfa:
    """Remove states that lead to no accepting one, and merge equivalent states."""
    rows, sources, shortest = _trim(rows, accept)
    if not shortest or shortest[0] < 0:
        return Dfa([], [])
    label, count = _equivalence_classes(rows, accept, sources, shortest)
    if count == len(rows):
        return Dfa(rows, accept)
    return _renumber(rows, accept, label)


def _trim(rows: list[Row], accept: list[bool]) -> tuple[list[Row], list[list[int]], list[int]]:
    """Remove the moves to states that lead to no accepting one.

    Returns the rows, the states before each state, and the length of its shortest text (-1: none).
    """
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for _, _, target in row:
            sources[target].append(state)
    shortest = [0 if accepts else -1 for accepts in accept]
    states = [state for state, accepts in enumerate(accept) if accepts]
    for state in states:  # breadth first: it grows
        for source in sources[state]:
            if shortest[source] < 0:
                shortest[source] = shortest[state] + 1
                states.append(source)
    if len(states) < len(rows):
        rows = [
            tuple(move for move in row if shortest[move[2]] >= 0) if length >= 0 else ()
            for row, length in zip(rows, shortest, strict=True)
        ]
    return rows, sources, shortest


def _renumber(rows: list[Row], accept: list[bool], label: list[int]) -> Dfa:
    """Number classes of states in order of discovery."""
    ids, order = {label[0]: 0}, [0]
    merged = list[Row]()
    for state in order:
        row = list[tuple[int, int, int]]()
        for low, high, target in rows[state]:
            index = ids.get(label[target])
            if index is None:
                index = ids[label[target]] = len(order)
                order.append(target)
            if row and row[-1][2] == index and row[-1][1] == low - 1:
                row[-1] = (row[-1][0], high, index)
            else:
                row.append((low, high, index))
        merged.append(tuple(row))
    return Dfa(merged, [accept[state] for state in order])


def _longest(rows: list[Row], sources: list[list[int]], shortest: list[int]) -> list[int]:
    """The length of each state's longest text; -1 where there is none, or no bound."""
    waiting, longest = [len(row) for row in rows], [-1] * len(rows)
    states = [state for state, count in enumerate(waiting) if not count and shortest[state] >= 0]
    for state in states:
        longest[state] = max((1 + longest[target] for _, _, target in rows[state]), default=0)
        for source in sources[state]:
            waiting[source] -= 1
            if not waiting[source] and shortest[source] >= 0:
                states.append(source)
    return longest


def _equivalence_classes(
    rows: list[Row], accept: list[bool], sources: list[list[int]], shortest: list[int]
) -> tuple[list[int], int]:
    """[S]: the number of the class of each state, and of all: states of one class accept the same texts.

    Partition refinement (Hopcroft 1971): a class is split by its members' next classes where one of these has changed;
    its largest part keeps the number. At first states are apart if their texts differ in their first bytes, or in the
    shortest or longest of them.
    """
    label, members = [-1] * len(rows), list[set[int]]()
    groups: dict[object, list[int]] = {}
    longest = _longest(rows, sources, shortest)
    for state, row in enumerate(rows):
        if shortest[state] >= 0:
            letters = [shortest[state], longest[state], accept[state]]
            for low, high, _ in row:
                if letters[-1] == low and len(letters) > 3:
                    letters[-1] = high + 1
                else:
                    letters += (low, high + 1)
            groups.setdefault(tuple(letters), []).append(state)
    for group in groups.values():
        for state in group:
            label[state] = len(members)
        members.append({*group})
    changed = [state for group in members if len(group) > 1 for state in group]
    while changed:
        dirty: dict[int, list[int]] = {}
        for state in changed:
            dirty.setdefault(label[state], []).append(state)
        splits = list[tuple[int, list[set[int]]]]()
        for index, states in dirty.items():
            parts: dict[object, set[int]] = {}
            for state in states:
                signature = list[int]()
                for low, high, target in rows[state]:
                    following = label[target]
                    if not signature or signature[-1] != following or signature[-2] != low:
                        signature += (low, high + 1, following)
                    else:
                        signature[-2] = high + 1
                parts.setdefault(tuple(signature), set()).add(state)
            unchanged = members[index].difference(states) if len(states) < len(members[index]) else set[int]()
            splits.append((index, sorted((part for part in (*parts.values(), unchanged) if part), key=len)))
        moved = list[int]()
        for index, pieces in splits:
            members[index] = pieces.pop()
            for piece in pieces:
                for state in piece:
                    label[state] = len(members)
                members.append(piece)
                moved += piece
        changed = list(
            {
                source
                for state in moved
                for source in sources[state]
                if label[source] >= 0 and len(members[label[source]]) > 1
            }
        )
    return label, len(members)


# ---- operations ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def intersect(first: Dfa, second: Dfa) -> Dfa:
    """Texts of both languages."""
    if first is second or not first.rows:
        return first
    if not second.rows:
        return second
    ids, todo, rows = {(0, 0): 0}, [(0, 0)], list[Row]()
    for a, b in todo:
        row, left, right = list[tuple[int, int, int]](), first.rows[a], second.rows[b]
        i = j = 0
        while i < len(left) and j < len(right):
            low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
            if low <= high:
                pair = (left[i][2], right[j][2])
                if pair not in ids:
                    ids[pair] = len(todo)
                    todo.append(pair)
                row.append((low, high, ids[pair]))
            if left[i][1] <= right[j][1]:
                i += 1
            else:
                j += 1
        rows.append(tuple(row))
        if len(todo) > MOST_STATES // 4:
            raise too_large()
    return minimize(rows, [first.accept[a] and second.accept[b] for a, b in todo])


@lru_cache(maxsize=64)
def complement(language: Dfa) -> Dfa:
    """Texts of any characters that are not in the language."""
    if not language.rows:
        return ANY_TEXT
    sink, rows = len(language.rows), list[Row]()
    for row in (*language.rows, ()):
        full, begin = list[tuple[int, int, int]](), 0
        for low, high, target in (*row, (LAST_CHARACTER + 1, 0, 0)):
            full += [(max(a, begin), min(b, low - 1), sink) for a, b in ANY if max(a, begin) <= min(b, low - 1)]
            if low <= LAST_CHARACTER:
                full.append((low, high, target))
                begin = high + 1
        rows.append(tuple(full))
    accept = [*(not accepts for accepts in language.accept), True]
    rows, _, shortest = _trim(rows, accept)
    return _renumber(rows, accept, [*range(len(rows))]) if shortest[0] >= 0 else Dfa([], [])


def difference(first: Dfa, second: Dfa) -> Dfa:
    """Texts of the first language that are not in the second."""
    return intersect(first, complement(second))


ANY_TEXT = Dfa([tuple((low, high, 0) for low, high in ANY)], [True])


def to_node(language: Dfa, letter: Callable[[Ranges], Node] = Characters) -> Node:
    """The expression of a language; `letter` converts its sets of characters."""
    if not language.rows:
        return NEVER
    edges = []
    for row in language.rows:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in row:
            ranges.setdefault(target, []).append((low, high))
        edges.append(tuple((letter(tuple(parts)), target) for target, parts in ranges.items()))
    return Machine(tuple(edges), tuple(language.accept))
