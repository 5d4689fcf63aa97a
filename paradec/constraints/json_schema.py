"""JSON schemas as expressions over JSON texts; docs/structured.md lists the keywords.

`schema_document` reads a schema, `schema_shapes` finds the values that it allows, and this module builds the expression
of their texts: keys in the schema's order, one space or none after ":" and ",", recursive references down to `depth`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, TypeVar

from paradec.constraints import expressions, languages
from paradec.constraints.dfa import Dfa, complement, difference, explore, intersect, to_dfa, to_node
from paradec.constraints.expressions import NEVER, Characters, Machine, Node, Ranges, either, repeat, sequence, text
from paradec.constraints.regex import parse
from paradec.constraints.schema_document import SchemaDocument
from paradec.constraints.schema_shapes import NO_VALUE, OPEN, Goal, Goals, Shape
from paradec.core.checks import short_repr

State = TypeVar("State")
MAX_LENGTHS = 1024, 512, 256, 128, 64
"""Limits of string lengths, tried in turn until the automaton is small enough. A larger `maxLength` is read as the
limit. Beyond 8 items, `STATES_PER_CHARACTER` times the limit also bounds the total size of an array's items."""
MAX_MOVES = 2**18
MAX_SIZE = 8000
STATES_PER_CHARACTER = 10
MAX_REORDERED = 1024
"""Maximum `Machine.size` of an object's members for which the required keys may also come first."""
ESCAPE = parse(r'\\(?:["\\/bfnrt]|u(?:[0-9A-Ca-cEeFf][0-9A-Fa-f]{3}|[Dd][0-7][0-9A-Fa-f]{2}))')
"""Escapes of one character each, without surrogates."""
UNESCAPED = expressions.subtract_ranges(expressions.ANY, ((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))))
CHARACTER = to_node(to_dfa(either((Characters(UNESCAPED), ESCAPE))))
MAX_STATES_WITH_CODES = 64
"""Strings whose automaton has more states than this have no escapes of six characters (backslash, u, 4 digits)."""
PLAIN_NODES = {"number": languages.NUMBER, "boolean": to_node(languages.BOOLEANS), "null": text("null")}
QUOTE, SPACE = text('"'), parse(" ?")
COMMA, COLON = sequence((text(","), SPACE)), sequence((text(":"), SPACE))
ESCAPES = {ord('"'): '"', ord("\\"): "\\", ord("/"): "/", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}


@lru_cache(maxsize=8)
def read_schema(schema: str, depth: int, max_length: int = MAX_LENGTHS[0]) -> tuple[Node, tuple[str, ...]]:
    """Convert a schema, passed as JSON text. Returns the expression, and names of ignored keywords and formats.

    max_length: the first entry of `MAX_LENGTHS` to try.

    Raises ValueError for an unsupported keyword or a wrong value (the message has its path), or if no text is allowed.
    """
    document = SchemaDocument(json.loads(schema))
    try:
        node: Node = NEVER
        size = float("inf")
        for length in MAX_LENGTHS[MAX_LENGTHS.index(max_length) :]:
            goals = Goals(document, length)
            shorter = _Writer(goals, depth, length).write(document.root)
            if shorter.size > 0.9 * size:  # shorter strings hardly help
                break
            node, size = shorter, shorter.size
            if size < MAX_SIZE:
                break
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if node is NEVER:
        why = f"; paradec leaves out {', '.join(goals.left_out)}" if goals.left_out else ""
        raise ValueError(f"schema={short_repr(document.root)} allows no text with depth={depth}{why}")
    return node, tuple(document.unknown)


class _Writer:
    """Builder of the expression of a goal's texts. A goal is a set of subschemas that a value must, or must not, match.

    A recursive goal is expanded to `depth` levels; there is one node for each goal and number of remaining levels.
    """

    def __init__(self, goals: Goals, depth: int, max_length: int):
        self.goals, self.depth, self.max_size = goals, depth, max_length * STATES_PER_CHARACTER
        self._back_references: set[tuple[Goal, Goal]] = set()
        self._nodes: dict[tuple[Goal, int], Node] = {}
        self._open: dict[int, Node] = {}
        self._others: dict[Shape, list[tuple[Dfa, Goal]]] = {}

    def write(self, root: Any) -> Node:
        goal = self.goals.goal(root)
        self._find_cycles(goal, {})
        return self.value_node(goal, max(self.depth, 1))

    def _find_cycles(self, goal: Goal, is_open: dict[Goal, bool]) -> None:
        """Find the references from goals to enclosing goals."""
        is_open[goal] = True
        for child in self.children(goal):
            if child not in is_open:
                self._find_cycles(child, is_open)
            elif is_open[child]:
                self._back_references.add((goal, child))
        is_open[goal] = False

    def children(self, goal: Goal) -> dict[Goal, None]:
        children = list[Goal]()
        for shape in self.goals.shapes(goal):
            if shape.kind == "object":
                children += [self.goals.key_goal(shape, name) for name in shape.listed_names()]
                children += [child for _, child in self.other_keys(shape)]
            elif shape.kind == "array":
                children += [self.goals.item_goal(shape, index) for index in range(self.num_positions(shape) + 1)]
        return {child: None for child in children if child not in (OPEN, NO_VALUE)}

    def child(self, goal: Goal, child: Goal, levels: int) -> Node:
        """Texts of the values of a goal's child. A recursive reference uses one of the `levels`."""
        levels -= (goal, child) in self._back_references
        return self.value_node(child, levels) if levels > 0 else NEVER

    def value_node(self, goal: Goal, levels: int) -> Node:
        """Texts of a goal's values, with `levels` remaining levels of recursion."""
        if goal == OPEN:
            return self.any_node(self.depth)
        key = (goal, levels)
        if key not in self._nodes:
            self._nodes[key] = either(self.shape_node(goal, shape, levels) for shape in self.goals.shapes(goal))
        return self._nodes[key]

    def any_node(self, depth: int) -> Node:
        """Texts of any value with `depth` levels of arrays and objects."""
        if depth not in self._open:
            parts: list[Node] = [string(None), *PLAIN_NODES.values()]
            if depth > 0:
                item = self.any_node(depth - 1)
                parts += [brackets(_any_number(item)), braces(_any_number(entry(string(None), item)))]
            self._open[depth] = either(parts)
        return self._open[depth]

    def shape_node(self, goal: Goal, shape: Shape, levels: int) -> Node:
        if shape.kind == "object":
            return self.object_node(goal, shape, levels)
        if shape.kind == "array":
            return self.array_node(goal, shape, levels)
        if shape.kind == "string":
            return string(shape.language)
        return PLAIN_NODES[shape.kind] if shape.language is None else to_node(shape.language)

    def other_keys(self, shape: Shape) -> list[tuple[Dfa, Goal]]:
        """List the languages of the keys that the schema does not list, each with the goal of their values.

        The list is empty unless the schema has a keyword for such keys, or lists no keys at all.
        """
        if shape in self._others:
            return self._others[shape]
        others = self._others[shape] = list[tuple[Dfa, Goal]]()
        positive = [part for part in shape.members if not part.is_negative]
        writes_all = any(part.writes_others for part in positive) or not any(
            goal != NO_VALUE
            for part in positive
            for goal in (*part.listed.values(), *(inner for _, inner in part.patterns))
        )
        patterns = dict.fromkeys(pattern for part in shape.members for pattern, _ in part.patterns)
        if not patterns and (not writes_all or any(NO_VALUE <= part.others for part in shape.members)):
            return others
        known = {*shape.required, *(name for part in shape.members for name in part.listed)}
        cells = {frozenset[Dfa](): complement(languages.texts_language([*known]))}
        for pattern in patterns:
            cells = {
                matched: language
                for outer, cell in cells.items()
                for matched, language in (
                    (outer | {pattern}, intersect(cell, pattern)),
                    (outer, difference(cell, pattern)),
                )
                if language.rows
            }
            if len(cells) > 64:
                raise ValueError("schema: patternProperties overlap in more than 64 ways")
        for matched, language in cells.items():
            if writes_all or matched:
                matching = [[inner for pattern, inner in part.patterns if pattern in matched] for part in shape.members]
                goals = [inner or [part.others] for inner, part in zip(matching, shape.members, strict=True)]
                if not NO_VALUE <= (goal := frozenset().union(*(inner for inners in goals for inner in inners))):
                    others.append((language, goal))
        return others

    def object_node(self, goal: Goal, shape: Shape, levels: int) -> Node:
        required = dict.fromkeys(shape.required)
        entries = dict[str, tuple[Node, bool]]()
        for name in shape.listed_names():
            child = self.goals.key_goal(shape, name)
            value = NEVER if NO_VALUE <= child else self.child(goal, child, levels)
            node = entry(text(json.dumps(name, ensure_ascii=False)), value)
            if node is NEVER and name in required:
                return NEVER
            if node is not NEVER:
                entries[name] = (node, name in required)
        rest = either(
            entry(string(language), self.any_node(self.depth - 1) if child == OPEN else self.child(goal, child, levels))
            for language, child in self.other_keys(shape)
            if child != OPEN or self.depth > 0
        )
        if shape.max_count == 0:
            return NEVER if required else braces(expressions.EMPTY)
        members = _members([*entries.values()], rest, shape.min_count > 0)
        first = {name: entries[name] for name in required} | entries
        if [*first] != [*entries] and not shape.implied and members.size <= MAX_REORDERED:
            members = either((members, _members([*first.values()], rest, shape.min_count > 0)))
        return braces(members)

    def num_positions(self, shape: Shape) -> int:
        return max((1 + index for part in shape.members for index in part.listed), default=0)

    def array_node(self, goal: Goal, shape: Shape, levels: int) -> Node:
        def item(child: Goal) -> Node:
            if child == OPEN:
                return self.any_node(self.depth - 1) if self.depth > 0 else NEVER
            return NEVER if NO_VALUE <= child else self.child(goal, child, levels)

        size, max_count = self.num_positions(shape), shape.max_count
        items = [item(self.goals.item_goal(shape, index)) for index in range(size + 1)]
        last = max(size, shape.min_count, 1)
        if max_count is not None:
            last = min(max_count, max(last, 8, self.max_size // max(1, items[-1].size)))

        def moves(index: int) -> Iterable[tuple[Node, int]]:
            if index < last or max_count is None:
                yield items[min(index, size)], min(index + 1, max(last, 1))

        return brackets(_comma_list(0, moves, lambda index: index >= shape.min_count))


def entry(key: Node, value: Node) -> Node:
    return sequence((key, COLON, value))


def braces(members: Node) -> Node:
    return sequence((text("{"), members, text("}")))


def brackets(items: Node) -> Node:
    return sequence((text("["), items, text("]")))


def _any_number(letter: Node) -> Node:
    return _comma_list(0, lambda _: [(letter, 1)], lambda _: True)


def _comma_list(
    start: State, moves: Callable[[State], Iterable[tuple[Node, State]]], is_end: Callable[[State], bool]
) -> Node:
    """Build a list separated by commas, with one part for each move of an automaton on a path from start to end."""

    def parts(state: tuple[State, bool | None]) -> list[tuple[Node, None, tuple[State, bool | None]]]:
        if state[1] is False:
            return [(COMMA, None, (state[0], True))]
        return [(node, None, (target, False)) for node, target in moves(state[0]) if node is not NEVER]

    begin: tuple[State, bool | None] = (start, None)  # None: at the start, False: after a part, True: after a comma
    rows, accept = explore(begin, parts, lambda state: not state[1] and is_end(state[0]), MAX_MOVES)
    edges = tuple(tuple((node, target) for node, _, target in row) for row in rows)
    return Machine(edges, tuple(accept)) if any(accept) else NEVER


def string(language: Dfa | None) -> Node:
    return sequence((QUOTE, repeat(CHARACTER) if language is None else _escape_language(language), QUOTE))


@lru_cache(maxsize=1024)
def _escape_language(language: Dfa) -> Node:
    return to_node(language, partial(_escape_set, omits_codes=len(language.rows) > MAX_STATES_WITH_CODES))


@lru_cache(maxsize=1024)
def _escape_set(ranges: Ranges, omits_codes: bool) -> Node:
    """One character of a set in JSON: unescaped where JSON allows it, or escaped. omits_codes: no \\u escapes."""
    if ranges == expressions.ANY and not omits_codes:
        return CHARACTER
    escaped = expressions.subtract_ranges(expressions.ANY, UNESCAPED)
    parts = [expressions.characters(expressions.subtract_ranges(ranges, escaped))]
    parts += [text("\\" + char) for code, char in ESCAPES.items() if any(a <= code <= b for a, b in ranges)]
    coded = expressions.subtract_ranges(ranges, ((32, 127), (0x10000, expressions.LAST_CHARACTER)))
    if coded and not omits_codes:
        parts.append(sequence((text("\\u"), _write_codes(coded))))
    return to_node(to_dfa(either(parts)))


def _write_codes(ranges: Ranges) -> Node:
    """Four hexadecimal digits, in lower case, of characters up to U+FFFF."""

    def moves(block: tuple[int, Ranges]) -> Iterable[tuple[int, int, tuple[int, Ranges]]]:
        """Read a digit. State: the size of the block of code points that remain, and the ranges in it."""
        size = block[0] // 16
        for digit in range(16) if size else ():
            within = ((max(low - digit * size, 0), min(high - digit * size, size - 1)) for low, high in block[1])
            if inner := tuple(part for part in within if part[0] <= part[1]):
                yield ord(f"{digit:x}"), ord(f"{digit:x}"), (size, inner)

    return to_node(Dfa(*explore((2**16, ranges), moves, lambda block: block[0] == 1)))


def _members(entries: list[tuple[Node, bool]], rest: Node, needs_one: bool) -> Node:
    """Members of an object in order: `entries` (node, is_required), then any number of `rest`. needs_one: not empty."""
    size = len(entries)

    def moves(state: tuple[int, bool]) -> Iterable[tuple[Node, tuple[int, bool]]]:
        for position in range(state[0], size):
            yield entries[position][0], (position + 1, True)
            if entries[position][1]:
                return
        yield rest, (size + 1, True)

    def is_end(state: tuple[int, bool]) -> bool:
        return state[1] and not any(is_required for _, is_required in entries[state[0] :])

    return _comma_list((0, not needs_one), moves, is_end)
