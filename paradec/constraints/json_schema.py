"""JSON schemas become expressions over the texts of JSON; what an automaton cannot hold is refused by its path.

Supported: `type` (one or several), `properties` and `required` (keys in the schema's order), `additionalProperties`
where there are no `properties`, `items`, `prefixItems`, `minItems`, `maxItems`, `enum`, `const`, `anyOf`, `allOf` of
one, `$ref` within the schema (recursive ones down to `depth`), `minLength`, `maxLength`, `pattern`, some `format`s, and
`minimum`, `maximum` and the exclusive bounds of integers. Objects hold the properties that are listed, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from paradec.constraints.expressions import (
    ANY,
    EMPTY,
    NEVER,
    Characters,
    Either,
    Node,
    Repeated,
    Sequence,
    characters,
    either,
    optional,
    repeated,
    sequence,
    text,
    without,
)
from paradec.constraints.regex import branches, parse
from paradec.core.checks import shown

MOST_NODES = 2**14
"""Parts that an expression may have."""
NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "contentMediaType", "contentEncoding"),
}
"""Keywords that allow and forbid nothing."""
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
BOUNDS = OF_TYPE["integer"]
SHORT = parse(r'\\(?:["\\/bfnrt]|u(?:[0-9A-Ca-cEeFf][0-9A-Fa-f]{3}|[Dd][0-7][0-9A-Fa-f]{2}))')
"""Escapes of one character each: without halves of pairs."""
PLAIN = without(ANY, ((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))))
CHARACTER = either((Characters(PLAIN), SHORT))
QUOTE, SPACE = text('"'), parse(" ?")
COMMA, COLON = sequence((text(","), SPACE)), sequence((text(":"), SPACE))
INTEGER = parse("-?(?:0|[1-9][0-9]*)")
NUMBER = sequence((INTEGER, parse(r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")))
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
HOST = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
HEX = "[0-9a-f]"
FORMATS = {
    "date": DATE,  # without the 29th of February, which not every year has
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
    "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{HOST}(?:\.{HOST})+",
}


@lru_cache(maxsize=8)
def expression(schema: str, depth: int) -> Node:
    """Convert a schema, given as JSON. Raises ValueError for an unsupported keyword, by its path, or without texts."""
    whole = json.loads(schema)
    try:
        found = _Schema(whole).node(whole, "", depth, ())
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if found == NEVER:
        raise ValueError(f"schema={shown(whole)} allows no text with depth={depth}")
    return found


class _Schema:
    def __init__(self, whole: Any):
        self.whole = whole
        self.nodes = 0

    def node(self, schema: Any, path: str, depth: int, open_: tuple[str, ...]) -> Node:
        """The values of a part of the schema. path: where it is. open_: references that it is inside of."""
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ValueError(f"the schema has more than {MOST_NODES} parts at depth {depth}")
        if schema is True or schema == {}:
            return self.anything(depth)
        if schema is False:
            return NEVER
        if not isinstance(schema, Mapping):
            raise ValueError(f"schema: {path or 'the whole'} is {shown(schema)}, not a schema")
        said = {key: value for key, value in schema.items() if key not in NOTES}
        for key, rule in (
            ("$ref", self.referred),
            ("enum", self.listed),
            ("const", self.constant),
            ("anyOf", self.any_of),
        ):
            if key in said:
                # a type beside a list says nothing more where all that is listed is of it
                allowed = {key, "type"} if key in ("enum", "const") else {key}
                self.check_keys(said, allowed, path)
                return rule(said, path, depth, open_)
        if "allOf" in said:
            self.check_keys(said, {"allOf"}, path)
            if len(said["allOf"]) != 1:
                raise self.refuse(path, "allOf", "with several schemas is not supported")
            return self.node(said["allOf"][0], f"{path}.allOf[0]", depth, open_)
        return self.typed(said, path, depth, open_)

    def refuse(self, path: str, key: str, why: str = "is not supported") -> ValueError:
        return ValueError(f"schema: {f'{path}.{key}'.lstrip('.')} {why}")

    def check_keys(self, said: Mapping[str, Any], allowed: set[str], path: str) -> None:
        others = sorted(allowed & said.keys()) if len(allowed) <= 3 else []
        for key in said:
            if key not in allowed:
                beside = f" beside {', '.join(others)}" if others else ""
                raise self.refuse(path, key, f"is not supported{beside}")

    # ---- what is listed --------------------------------------------------------------------------------------------

    def referred(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        place = said["$ref"]
        if not isinstance(place, str) or not place.startswith("#"):
            raise self.refuse(path, "$ref", f"{shown(place)} is not in the schema")
        found = self.whole
        for name in place[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise self.refuse(path, "$ref", f"{shown(place)} is not in the schema")
            found = found[name]
        if open_.count(place) >= max(depth, 1):
            return NEVER
        return self.node(found, path, depth, (*open_, place))

    def listed(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        if not isinstance(said["enum"], list) or not said["enum"]:
            raise self.refuse(path, "enum", "must be a list of values")
        return either(self.literal(value) for value in said["enum"] if _is_of(value, said.get("type")))

    def constant(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        return self.literal(said["const"]) if _is_of(said["const"], said.get("type")) else NEVER

    def any_of(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        return either(self.node(part, f"{path}.anyOf[{at}]", depth, open_) for at, part in enumerate(said["anyOf"]))

    def literal(self, value: Any) -> Node:
        if isinstance(value, Mapping):
            entries = [sequence((self.literal(key), COLON, self.literal(inner))) for key, inner in value.items()]
            return sequence((text("{"), *_separated(entries), text("}")))
        if isinstance(value, list):
            return sequence((text("["), *_separated([self.literal(inner) for inner in value]), text("]")))
        return text(json.dumps(value, ensure_ascii=False))

    # ---- types -----------------------------------------------------------------------------------------------------

    def typed(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        kinds = said.get("type", [kind for kind, keys in OF_TYPE.items() if keys & said.keys()])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        for kind in kinds:
            if kind not in OF_TYPE:
                raise self.refuse(path, "type", f"{shown(kind)} must be one of {', '.join(OF_TYPE)}")
        allowed = {"type"}.union(*(OF_TYPE[kind] for kind in kinds))
        if "number" in kinds and BOUNDS & said.keys():
            raise self.refuse(path, min(BOUNDS & said.keys()), "is not supported for numbers, only for integers")
        self.check_keys(said, allowed, path)
        if not kinds:
            return self.anything(depth)
        rules = {"object": self.object, "array": self.array, "string": self.string, "integer": self.integer}
        fixed = {"number": NUMBER, "boolean": either((text("true"), text("false"))), "null": text("null")}
        return either(fixed[kind] if kind in fixed else rules[kind](said, path, depth, open_) for kind in kinds)

    def anything(self, depth: int) -> Node:
        self.nodes += 20
        simple = (string_of(repeated(CHARACTER)), NUMBER, text("true"), text("false"), text("null"))
        if depth == 0:
            return either(simple)
        inner = self.anything(depth - 1)
        return either((*simple, _array(inner, 0, None), _map(inner)))

    def object(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        listed, needed = said.get("properties", {}), dict.fromkeys(said.get("required", ()))
        more = said.get("additionalProperties", True)
        for name in needed:
            if name not in listed:
                raise self.refuse(path, "required", f"names {name!r}, which properties does not list")
        if not listed:
            if more is False:
                return text("{}")
            if depth == 0:
                return NEVER
            if more in (True, {}):
                return _map(self.anything(depth - 1))
            return _map(self.node(more, f"{path}.additionalProperties", depth - 1, open_))
        entries = []
        for name, schema in listed.items():
            value = self.node(schema, f"{path}.properties.{name}" if path else f"properties.{name}", depth, open_)
            entries.append((sequence((text(json.dumps(name, ensure_ascii=False)), COLON, value)), name in needed))
        return sequence((text("{"), _some(entries), text("}")))

    def array(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        least, most = (self.count(said, key, path) for key in ("minItems", "maxItems"))
        front = [
            self.node(part, f"{path}.prefixItems[{at}]", depth, open_)
            for at, part in enumerate(said.get("prefixItems", ()))
        ]
        rest = said.get("items", not front)
        free = rest in (True, {})
        inner: Node = NEVER
        if not free or depth > 0:
            inner = self.anything(depth - 1) if free else self.node(rest, f"{path}.items", depth, open_)
        if not front:
            return _array(inner, least or 0, most)
        if (least or 0) < len(front) or most is not None and most < len(front):
            raise self.refuse(path, "prefixItems", f"has {len(front)} schemas; give minItems={len(front)} at least")
        more = repeated(
            sequence((COMMA, inner)), (least or 0) - len(front), None if most is None else most - len(front)
        )
        return sequence((text("["), *_separated(front), more, text("]")))

    def count(self, said: Mapping[str, Any], key: str, path: str) -> int | None:
        value = said.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self.refuse(path, key, f"is {shown(value)}, and must be a number from 0")
        return value

    def string(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        least, most = (self.count(said, key, path) for key in ("minLength", "maxLength"))
        for key in ("pattern", "format"):
            if key in said and (least or most is not None or {"pattern", "format"} <= said.keys()):
                raise self.refuse(path, key, "is not supported beside another limit of the string")
        if "format" in said:
            if said["format"] not in FORMATS:
                raise self.refuse(path, "format", f"{shown(said['format'])} must be one of {', '.join(FORMATS)}")
            return string_of(parse(FORMATS[said["format"]]))
        if "pattern" in said:
            try:
                found = branches(said["pattern"])
            except (ValueError, TypeError) as error:
                raise self.refuse(path, "pattern", f"is not supported: {error}") from None
            anything, ways = repeated(CHARACTER), []
            for branch in found:
                before, after = (EMPTY if anchored else anything for anchored in (branch.begins, branch.ends))
                ways.append(string_of(sequence((before, _written(branch.node), after))))
            return either(ways)
        if most is not None and most < (least or 0):
            return NEVER
        return string_of(repeated(CHARACTER, least or 0, most))

    def integer(self, said: Mapping[str, Any], path: str, depth: int, open_: tuple[str, ...]) -> Node:
        bounds: dict[str, int] = {}
        for key in BOUNDS & said.keys():
            value = said[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
                raise self.refuse(path, key, f"is {shown(value)}, and must be a whole number")
            bounds[key] = int(value)
        lows = [bounds[key] + step for key, step in (("minimum", 0), ("exclusiveMinimum", 1)) if key in bounds]
        highs = [bounds[key] - step for key, step in (("maximum", 0), ("exclusiveMaximum", 1)) if key in bounds]
        return between(max(lows, default=None), min(highs, default=None))


# ---- texts of JSON ---------------------------------------------------------------------------------------------------


def string_of(inner: Node) -> Node:
    return sequence((QUOTE, inner, QUOTE))


def _separated(parts: list[Node]) -> Iterator[Node]:
    for at, part in enumerate(parts):
        yield part if at == 0 else sequence((COMMA, part))


def _array(inner: Node, least: int, most: int | None) -> Node:
    if most is not None and most < least:
        return NEVER
    if most == 0:
        return text("[]")
    return sequence((text("["), repeated(inner, least, most, COMMA), text("]")))


def _map(inner: Node) -> Node:
    entry = sequence((string_of(repeated(CHARACTER)), COLON, inner))
    return sequence((text("{"), repeated(entry, 0, None, COMMA), text("}")))


def _some(entries: list[tuple[Node, bool]]) -> Node:
    """Entries in their order, those that are needed (True) and any of the others, with commas between them."""

    def ways() -> Iterator[Node]:
        for at, (entry, needed) in enumerate(entries):  # the first one that is there
            rest = (
                sequence((COMMA, other)) if wanted else optional(sequence((COMMA, other)))
                for other, wanted in entries[at + 1 :]
            )
            yield sequence((entry, *rest))
            if needed:
                return
        yield EMPTY

    return either(ways())


def _is_of(value: Any, kinds: Any) -> bool:
    """Whether a value is of a type, or of one of several."""
    if kinds is None:
        return True
    known = {
        "object": isinstance(value, Mapping),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
    }
    return any(known.get(kind, False) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _written(node: Node) -> Node:
    """An expression over the characters of a string as one over its text, in which some of them are escaped."""
    match node:
        case Characters(ranges):
            special = without(ranges, PLAIN)
            escaped = [code for first, last in special for code in range(first, last + 1)]
            ways = (text(json.dumps(chr(code))[1:-1]) for code in escaped)
            return either((characters(set_) if (set_ := without(ranges, special)) else NEVER, *ways))
        case Sequence(parts):
            return sequence(_written(part) for part in parts)
        case Either(parts):
            return either(_written(part) for part in parts)
        case Repeated(part, least, most):
            return repeated(_written(part), least, most)


def between(low: int | None, high: int | None) -> Node:
    """The decimal texts of the integers from low to high; None is no bound."""
    if low is not None and high is not None and low > high:
        return NEVER
    ways = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        ways.append(sequence((text("-"), _from(least, None if low is None else -low))))
    if high is None or high >= 0:
        ways.append(_from(max(low or 0, 0), high))
    return either(ways)


def _from(low: int, high: int | None) -> Node:
    """The same of integers from low, at least 0."""
    if high is None:
        longer = repeated(_digits("0", "9"), len(str(low)))
        larger = sequence((_digits("1", "9"), longer))
        return either((_from(low, 10 ** len(str(low)) - 1), larger))
    ways = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        ways.append(_same_size(str(first), str(min(high, 10**size - 1))))
    return either(ways)


def _same_size(low: str, high: str) -> Node:
    """The texts of digits from low to high, which are as long."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return sequence((_digits(low[0], high[0]), repeated(_digits("0", "9"), rest, rest)))
    if low[0] == high[0]:
        return sequence((text(low[0]), _same_size(low[1:], high[1:])))
    ways = [sequence((text(low[0]), _same_size(low[1:], "9" * rest)))]
    if int(high[0]) - int(low[0]) > 1:
        middle = _digits(str(int(low[0]) + 1), str(int(high[0]) - 1))
        ways.append(sequence((middle, repeated(_digits("0", "9"), rest, rest))))
    ways.append(sequence((text(high[0]), _same_size("0" * rest, high[1:]))))
    return either(ways)


def _digits(low: str, high: str) -> Node:
    return Characters(((ord(low), ord(high)),))
