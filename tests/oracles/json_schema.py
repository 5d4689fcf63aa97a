"""A plain JSON Schema validator, keyword by keyword, to compare automata with."""

from __future__ import annotations

import datetime
import math
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def has_kind(value: Any, kind: str) -> bool:
    if kind in KINDS:
        return isinstance(value, KINDS[kind])
    return is_number(value) and (kind == "number" or value == int(value))


def equal(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, but not true."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def is_format(value: str, name: str) -> bool:
    try:
        {"date": datetime.date.fromisoformat, "uuid": uuid.UUID}.get(name, str)(value)
    except ValueError:
        return False
    return True


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value is valid. Keywords next to `$ref` are checked too. root: where references are resolved."""
    if isinstance(schema, bool):
        return schema

    def inner(part: Any, item: Any = value) -> bool:
        return is_valid(item, part, root)

    def follow(reference: str) -> bool:
        target = root
        for name in reference.split("/")[1:]:
            target = target[int(name)] if isinstance(target, list) else target[name]
        return inner(target)

    general: dict[str, Callable[[Any], bool]] = {
        "$ref": follow,
        "type": lambda kinds: any(has_kind(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)),
        "enum": lambda values: any(equal(value, allowed) for allowed in values),
        "const": lambda constant: equal(value, constant),
        "allOf": lambda parts: all(map(inner, parts)),
        "anyOf": lambda parts: any(map(inner, parts)),
        "oneOf": lambda parts: sum(map(inner, parts)) == 1,
        "not": lambda part: not inner(part),
        "if": lambda part: inner(schema.get("then" if inner(part) else "else", True)),
    }
    if not all(check(schema[key]) for key, check in general.items() if key in schema):
        return False
    if isinstance(value, str):
        return _is_valid_string(value, schema)
    if is_number(value):
        return _is_valid_number(value, schema)
    if isinstance(value, list):
        return _is_valid_array(value, schema, inner)
    return not isinstance(value, dict) or _is_valid_object(value, schema, inner)


def _is_valid_string(value: str, schema: Any) -> bool:
    return (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        and ("pattern" not in schema or re.search(schema["pattern"], value, re.ASCII) is not None)
        and is_format(value, schema.get("format", ""))
    )


def _is_valid_number(value: float, schema: Any) -> bool:
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    return (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        and (low is None or value > low)
        and (high is None or value < high)
        and ("multipleOf" not in schema or Decimal(str(value)) % Decimal(str(schema["multipleOf"])) == 0)
    )


def _is_valid_array(value: list[Any], schema: Any, inner: Callable[[Any, Any], bool]) -> bool:
    items = schema.get("items", True)
    prefix, after_prefix = schema.get("prefixItems", []), items
    if isinstance(items, list):
        prefix, after_prefix = items, schema.get("additionalItems", True)
    count = sum(inner(schema["contains"], item) for item in value) if "contains" in schema else None
    return (
        schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)
        and all(inner(prefix[i] if i < len(prefix) else after_prefix, item) for i, item in enumerate(value))
        and (count is None or schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf))
        and not (schema.get("uniqueItems") and any(equal(a, b) for i, a in enumerate(value) for b in value[:i]))
    )


def _is_valid_object(value: dict[str, Any], schema: Any, inner: Callable[..., bool]) -> bool:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, field in value.items():
        parts = [properties[key]] if key in properties else []
        parts += [part for pattern, part in patterns.items() if re.search(pattern, key, re.ASCII)]
        if not all(inner(part, field) for part in parts or [schema.get("additionalProperties", True)]):
            return False
    for key, rule in (schema.get("dependencies", {}) | schema.get("dependentRequired", {})
                      | schema.get("dependentSchemas", {})).items():  # fmt: skip
        if key in value and not (value.keys() >= {*rule} if isinstance(rule, list) else inner(rule)):
            return False
    return (
        value.keys() >= {*schema.get("required", [])}
        and schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", math.inf)
        and all(inner(schema.get("propertyNames", True), key) for key in value)
    )
