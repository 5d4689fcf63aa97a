"""JSON schemas as expressions over JSON texts; unsupported keywords raise an error with their path.

Supported: `type` (one or several), `properties` and `required` (keys in the schema's order), `additionalProperties`
where there are no `properties`, `items`, `prefixItems`, `minItems`, `maxItems`, `enum`, `const`, `anyOf`, `allOf` of
one, `$ref` within the schema (recursive ones down to `depth`), `minLength`, `maxLength`, `pattern`, some `format`s, and
`minimum`, `maximum` and the exclusive bounds of integers. Objects hold only the listed properties.
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
"""Maximum number of parts of an expression."""
NOTES = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "contentMediaType", "contentEncoding"),
}
"""Annotation keywords, which are ignored."""
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
"""Escapes of one character each, without surrogates."""
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
    root = json.loads(schema)
    try:
        node = _Schema(root).node(root, "", depth, ())
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if node == NEVER:
        raise ValueError(f"schema={shown(root)} allows no text with depth={depth}")
    return node


class _Schema:
    def __init__(self, root: Any):
        self.root = root
        self.nodes = 0

    def node(self, schema: Any, path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        """Build the expression of a subschema. path: its place. open_refs: the references around it."""
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ValueError(f"the schema has more than {MOST_NODES} parts at depth {depth}")
        if schema is True or schema == {}:
            return self.anything(depth)
        if schema is False:
            return NEVER
        if not isinstance(schema, Mapping):
            raise ValueError(f"schema: {path or 'the whole'} is {shown(schema)}, not a schema")
        rules = {key: value for key, value in schema.items() if key not in NOTES}
        builders = {"$ref": self.reference, "enum": self.enum, "const": self.constant, "anyOf": self.any_of}
        for key, build in builders.items():
            if key in rules:
                # `type` next to `enum` or `const` filters the listed values
                allowed = {key, "type"} if key in ("enum", "const") else {key}
                self.check_keys(rules, allowed, path)
                return build(rules, path, depth, open_refs)
        if "allOf" in rules:
            self.check_keys(rules, {"allOf"}, path)
            if len(rules["allOf"]) != 1:
                raise self.refuse(path, "allOf", "with several schemas is not supported")
            return self.node(rules["allOf"][0], f"{path}.allOf[0]", depth, open_refs)
        return self.by_type(rules, path, depth, open_refs)

    def refuse(self, path: str, key: str, why: str = "is not supported") -> ValueError:
        return ValueError(f"schema: {f'{path}.{key}'.lstrip('.')} {why}")

    def check_keys(self, rules: Mapping[str, Any], allowed: set[str], path: str) -> None:
        known_keys = sorted(allowed & rules.keys()) if len(allowed) <= 3 else []
        for key in rules:
            if key not in allowed:
                suffix = f" beside {', '.join(known_keys)}" if known_keys else ""
                raise self.refuse(path, key, f"is not supported{suffix}")

    # ---- listed values --------------------------------------------------------------------------------------------

    def reference(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        reference = rules["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self.refuse(path, "$ref", f"{shown(reference)} is not in the schema")
        target = self.root
        for name in reference[1:].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                raise self.refuse(path, "$ref", f"{shown(reference)} is not in the schema")
            target = target[name]
        if open_refs.count(reference) >= max(depth, 1):
            return NEVER
        return self.node(target, path, depth, (*open_refs, reference))

    def enum(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        if not isinstance(rules["enum"], list) or not rules["enum"]:
            raise self.refuse(path, "enum", "must be a list of values")
        return either(self.literal(value) for value in rules["enum"] if _has_type(value, rules.get("type")))

    def constant(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        return self.literal(rules["const"]) if _has_type(rules["const"], rules.get("type")) else NEVER

    def any_of(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        return either(self.node(part, f"{path}.anyOf[{i}]", depth, open_refs) for i, part in enumerate(rules["anyOf"]))

    def literal(self, value: Any) -> Node:
        if isinstance(value, Mapping):
            entries = [sequence((self.literal(key), COLON, self.literal(item))) for key, item in value.items()]
            return sequence((text("{"), *_separated(entries), text("}")))
        if isinstance(value, list):
            return sequence((text("["), *_separated([self.literal(item) for item in value]), text("]")))
        return text(json.dumps(value, ensure_ascii=False))

    # ---- types -----------------------------------------------------------------------------------------------------

    def by_type(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        kinds = rules.get("type", [kind for kind, keys in OF_TYPE.items() if keys & rules.keys()])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        for kind in kinds:
            if kind not in OF_TYPE:
                raise self.refuse(path, "type", f"{shown(kind)} must be one of {', '.join(OF_TYPE)}")
        allowed = {"type"}.union(*(OF_TYPE[kind] for kind in kinds))
        if "number" in kinds and BOUNDS & rules.keys():
            raise self.refuse(path, min(BOUNDS & rules.keys()), "is not supported for numbers, only for integers")
        self.check_keys(rules, allowed, path)
        if not kinds:
            return self.anything(depth)
        builders = {"object": self.object, "array": self.array, "string": self.string, "integer": self.integer}
        fixed = {"number": NUMBER, "boolean": either((text("true"), text("false"))), "null": text("null")}
        return either(fixed[kind] if kind in fixed else builders[kind](rules, path, depth, open_refs) for kind in kinds)

    def anything(self, depth: int) -> Node:
        self.nodes += 20
        simple = (string_of(repeated(CHARACTER)), NUMBER, text("true"), text("false"), text("null"))
        if depth == 0:
            return either(simple)
        item = self.anything(depth - 1)
        return either((*simple, _array(item, 0, None), _map(item)))

    def object(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        properties, required = rules.get("properties", {}), dict.fromkeys(rules.get("required", ()))
        additional = rules.get("additionalProperties", True)
        for name in required:
            if name not in properties:
                raise self.refuse(path, "required", f"names {name!r}, which properties does not list")
        if not properties:
            if additional is False:
                return text("{}")
            if depth == 0:
                return NEVER
            if additional in (True, {}):
                return _map(self.anything(depth - 1))
            return _map(self.node(additional, f"{path}.additionalProperties", depth - 1, open_refs))
        entries = []
        for name, schema in properties.items():
            value = self.node(schema, f"{path}.properties.{name}" if path else f"properties.{name}", depth, open_refs)
            entries.append((sequence((text(json.dumps(name, ensure_ascii=False)), COLON, value)), name in required))
        return sequence((text("{"), _ordered_entries(entries), text("}")))

    def array(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        min_items, max_items = (self.count(rules, key, path) for key in ("minItems", "maxItems"))
        prefix = [
            self.node(part, f"{path}.prefixItems[{index}]", depth, open_refs)
            for index, part in enumerate(rules.get("prefixItems", ()))
        ]
        items = rules.get("items", not prefix)
        is_any = items in (True, {})
        item: Node = NEVER
        if not is_any or depth > 0:
            item = self.anything(depth - 1) if is_any else self.node(items, f"{path}.items", depth, open_refs)
        if not prefix:
            return _array(item, min_items or 0, max_items)
        if (min_items or 0) < len(prefix) or max_items is not None and max_items < len(prefix):
            raise self.refuse(path, "prefixItems", f"has {len(prefix)} schemas; give minItems={len(prefix)} at least")
        max_tail = None if max_items is None else max_items - len(prefix)
        tail = repeated(sequence((COMMA, item)), (min_items or 0) - len(prefix), max_tail)
        return sequence((text("["), *_separated(prefix), tail, text("]")))

    def count(self, rules: Mapping[str, Any], key: str, path: str) -> int | None:
        value = rules.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self.refuse(path, key, f"is {shown(value)}, and must be a number from 0")
        return value

    def string(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        min_length, max_length = (self.count(rules, key, path) for key in ("minLength", "maxLength"))
        for key in ("pattern", "format"):
            if key in rules and (min_length or max_length is not None or {"pattern", "format"} <= rules.keys()):
                raise self.refuse(path, key, "is not supported beside another limit of the string")
        if "format" in rules:
            if rules["format"] not in FORMATS:
                raise self.refuse(path, "format", f"{shown(rules['format'])} must be one of {', '.join(FORMATS)}")
            return string_of(parse(FORMATS[rules["format"]]))
        if "pattern" in rules:
            try:
                alternatives = branches(rules["pattern"])
            except (ValueError, TypeError) as error:
                raise self.refuse(path, "pattern", f"is not supported: {error}") from None
            anything, nodes = repeated(CHARACTER), []
            for branch in alternatives:
                prefix, suffix = (EMPTY if anchored else anything for anchored in (branch.begins, branch.ends))
                nodes.append(string_of(sequence((prefix, _escape(branch.node), suffix))))
            return either(nodes)
        if max_length is not None and max_length < (min_length or 0):
            return NEVER
        return string_of(repeated(CHARACTER, min_length or 0, max_length))

    def integer(self, rules: Mapping[str, Any], path: str, depth: int, open_refs: tuple[str, ...]) -> Node:
        bounds: dict[str, int] = {}
        for key in BOUNDS & rules.keys():
            value = rules[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
                raise self.refuse(path, key, f"is {shown(value)}, and must be a whole number")
            bounds[key] = int(value)
        lows = [bounds[key] + step for key, step in (("minimum", 0), ("exclusiveMinimum", 1)) if key in bounds]
        highs = [bounds[key] - step for key, step in (("maximum", 0), ("exclusiveMaximum", 1)) if key in bounds]
        return between(max(lows, default=None), min(highs, default=None))


# ---- texts of JSON ---------------------------------------------------------------------------------------------------


def string_of(content: Node) -> Node:
    return sequence((QUOTE, content, QUOTE))


def _separated(parts: list[Node]) -> Iterator[Node]:
    for index, part in enumerate(parts):
        yield part if index == 0 else sequence((COMMA, part))


def _array(item: Node, min_items: int, max_items: int | None) -> Node:
    if max_items is not None and max_items < min_items:
        return NEVER
    if max_items == 0:
        return text("[]")
    return sequence((text("["), repeated(item, min_items, max_items, COMMA), text("]")))


def _map(value: Node) -> Node:
    entry = sequence((string_of(repeated(CHARACTER)), COLON, value))
    return sequence((text("{"), repeated(entry, 0, None, COMMA), text("}")))


def _ordered_entries(entries: list[tuple[Node, bool]]) -> Node:
    """Build comma-separated entries in order: all required ones (True) and any of the others."""

    def alternatives() -> Iterator[Node]:
        for index, (entry, is_required) in enumerate(entries):  # the first one that is there
            following = (
                sequence((COMMA, later_entry)) if later_required else optional(sequence((COMMA, later_entry)))
                for later_entry, later_required in entries[index + 1 :]
            )
            yield sequence((entry, *following))
            if is_required:
                return
        yield EMPTY

    return either(alternatives())


def _has_type(value: Any, kinds: Any) -> bool:
    """Whether a value has one of the JSON types `kinds`."""
    if kinds is None:
        return True
    is_kind = {
        "object": isinstance(value, Mapping),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
    }
    return any(is_kind.get(kind, False) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _escape(node: Node) -> Node:
    """Convert an expression over a string's characters to one over its JSON text, with escapes."""
    match node:
        case Characters(ranges):
            special = without(ranges, PLAIN)
            escaped = [code for first, last in special for code in range(first, last + 1)]
            escapes = (text(json.dumps(chr(code))[1:-1]) for code in escaped)
            return either((characters(set_) if (set_ := without(ranges, special)) else NEVER, *escapes))
        case Sequence(parts):
            return sequence(_escape(part) for part in parts)
        case Either(parts):
            return either(_escape(part) for part in parts)
        case Repeated(part, least, most):
            return repeated(_escape(part), least, most)


def between(low: int | None, high: int | None) -> Node:
    """Build the decimal texts of the integers from low to high; None is no bound."""
    if low is not None and high is not None and low > high:
        return NEVER
    nodes = []
    if low is None or low < 0:
        min_magnitude = 1 if high is None or high >= 0 else -high
        nodes.append(sequence((text("-"), _from_bound(min_magnitude, None if low is None else -low))))
    if high is None or high >= 0:
        nodes.append(_from_bound(max(low or 0, 0), high))
    return either(nodes)


def _from_bound(low: int, high: int | None) -> Node:
    """Build the decimal texts of integers from low >= 0 to high."""
    if high is None:
        longer = repeated(_digits("0", "9"), len(str(low)))
        larger = sequence((_digits("1", "9"), longer))
        return either((_from_bound(low, 10 ** len(str(low)) - 1), larger))
    nodes = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        nodes.append(_same_size(str(first), str(min(high, 10**size - 1))))
    return either(nodes)


def _same_size(low: str, high: str) -> Node:
    """Build the digit texts from low to high, which have equal length."""
    if not low:
        return EMPTY
    num_digits = len(low) - 1
    if low[1:] == "0" * num_digits and high[1:] == "9" * num_digits:
        return sequence((_digits(low[0], high[0]), repeated(_digits("0", "9"), num_digits, num_digits)))
    if low[0] == high[0]:
        return sequence((text(low[0]), _same_size(low[1:], high[1:])))
    nodes = [sequence((text(low[0]), _same_size(low[1:], "9" * num_digits)))]
    if int(high[0]) - int(low[0]) > 1:
        middle = _digits(str(int(low[0]) + 1), str(int(high[0]) - 1))
        nodes.append(sequence((middle, repeated(_digits("0", "9"), num_digits, num_digits))))
    nodes.append(sequence((text(high[0]), _same_size("0" * num_digits, high[1:]))))
    return either(nodes)


def _digits(low: str, high: str) -> Node:
    return Characters(((ord(low), ord(high)),))
