"""JSON schemas as documents: allowed values of keywords, and the paths, identifiers and references of subschemas."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from paradec.core.checks import short_repr

Schema = Mapping[str, Any] | bool
KINDS = ("object", "array", "string", "integer", "number", "boolean", "null")


def is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(is_schema, value.values()))


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(kind in KINDS for kind in kinds)


SCHEMA, SCHEMAS = (is_schema, "a schema"), (lambda value: _is_schemas(value) and value, "a list of schemas")
MAP, COUNT = (_is_map, "an object of schemas"), (is_count, "a whole number from 0")
TEXT = (lambda value: isinstance(value, str), "a text")
BOUND = (lambda value: is_number(value) or isinstance(value, bool), "a number")
KEYWORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "type": (_is_type, f"one of {', '.join(KINDS)}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and value, "a list of values"),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), MAP),
    **dict.fromkeys(("additionalProperties", "additionalItems", "not"), SCHEMA),
    **dict.fromkeys(("if", "then", "else"), SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), SCHEMAS),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), COUNT),
    "minProperties": (lambda value: is_number(value) and value in (0, 1), "0 or 1"),
    **dict.fromkeys(("$ref", "pattern", "format"), TEXT),
    **dict.fromkeys(("minimum", "maximum"), (is_number, "a number")),
    "exclusiveMinimum": BOUND,
    "exclusiveMaximum": BOUND,
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda value: value is False, "false: automata cannot compare items"),
    "prefixItems": (_is_schemas, "a list of schemas"),
    "items": (lambda value: is_schema(value) or _is_schemas(value), "a schema or a list of schemas"),
}
"""For each keyword: a check of its value, and the allowed values in words."""
CONST = "const"
UNSUPPORTED = {
    *("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "minContains", "maxContains", "maxProperties", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
}
CONSTRAINING = {*KEYWORDS, CONST} - {"$defs", "definitions"} | UNSUPPORTED
ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "id", "$id"),
    *("$schema", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$vocabulary", "contentMediaType"),
    *("contentEncoding", "contentSchema", "$recursiveAnchor"),
}
"""Keywords that do not restrict the allowed values. Unknown keywords are treated like them, with a warning."""
VALUE_KEYWORDS = {"enum", "const", "default", "examples", "example"}
MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions"}


def key_path(path: str, key: str) -> str:
    return f"{path}.{key}".lstrip(".")


class SchemaDocument:
    """A schema with the path and the base URI of each subschema.

    Raises ValueError if the schema is nested too deeply.
    """

    def __init__(self, root: Any):
        self.root = root
        self.paths: dict[int, str] = {}
        self.bases: dict[int, str] = {}
        self.unknown: dict[str, None] = {}
        """Names of unknown keywords and formats, in order."""
        self._by_uri: dict[str, Any] = {"": root}
        self._checked: set[int] = set()
        try:
            self._index(root, "", "", True)
        except RecursionError:
            raise ValueError("the schema is nested too deeply") from None

    def _index(self, value: Any, path: str, base: str, is_known: bool) -> None:
        """Record paths, base URIs and identifiers; identifiers below unknown keywords do not count."""
        if isinstance(value, list):
            for index, part in enumerate(value):
                self._index(part, f"{path}[{index}]", base, is_known)
        if not isinstance(value, Mapping) or id(value) in self.paths:
            return
        for key in ("$id", "id"):
            if is_known and isinstance(name := value.get(key), str):
                uri, fragment = urldefrag(urljoin(base, name))
                if fragment:
                    self._by_uri.setdefault(f"{uri}#{fragment}", value)
                elif key == "$id":
                    base = uri
                self._by_uri.setdefault(uri, value)
        for key in ("$anchor", "$dynamicAnchor"):
            if is_known and isinstance(name := value.get(key), str):
                self._by_uri.setdefault(f"{base}#{name}", value)
        self.paths[id(value)], self.bases[id(value)] = path, base
        for key, part in value.items():
            if key in VALUE_KEYWORDS:
                continue
            if key in MAP_KEYWORDS and isinstance(part, Mapping):
                for name, inner in part.items():
                    self._index(inner, key_path(key_path(path, key), name), base, is_known)
            else:
                self._index(part, key_path(path, key), base, is_known and key in KEYWORDS)

    def error(self, schema: Any, key: str, why: str) -> ValueError:
        return ValueError(f"schema: {key_path(self.paths.get(id(schema), ''), key)} {why}")

    def check(self, schema: Mapping[str, Any]) -> None:
        """Raise ValueError for an unsupported keyword, or a keyword with a wrong value."""
        if id(schema) in self._checked:
            return
        self._checked.add(id(schema))
        for key, value in schema.items():
            if key in UNSUPPORTED:
                raise self.error(schema, key, "is not supported")
            if key in KEYWORDS:
                is_valid, allowed = KEYWORDS[key]
                if not is_valid(value):
                    raise self.error(schema, key, f"is {short_repr(value)}, and must be {allowed}")
            elif key != CONST and key not in ANNOTATIONS:
                self.unknown[key] = None

    def resolve(self, schema: Mapping[str, Any]) -> Schema:
        """Return the schema that `$ref` names. Raises ValueError if there is none, or for `$id` next to `$ref`."""
        reference = schema["$ref"]
        if "$id" in schema and schema is not self.root:  # up to draft 7 `$ref` disables `$id`
            raise self.error(schema, "$ref", "next to $id has different meanings in the drafts: give one of them")
        target = self._find(self.bases.get(id(schema), ""), reference)
        if target is None:
            raise self.error(schema, "$ref", f"{short_repr(reference)} is not in the schema")
        if not is_schema(target):
            raise self.error(schema, "$ref", f"{short_repr(reference)} is {short_repr(target)}, not a schema")
        return target

    def _find(self, base: str, reference: str) -> Any:
        """Return the part of the document that a reference names; None if there is none."""
        uri, fragment = urldefrag(urljoin(base, reference))
        target = self._by_uri.get(uri)
        if fragment and not fragment.startswith("/"):
            target = self._by_uri.get(f"{uri}#{unquote(fragment)}")
        elif fragment:
            for name in fragment[1:].split("/"):
                name = unquote(name).replace("~1", "/").replace("~0", "~")
                if isinstance(target, list):
                    target = target[int(name)] if re.fullmatch("[0-9]{1,6}", name) and int(name) < len(target) else None
                else:
                    target = target.get(name) if isinstance(target, Mapping) else None
        return target
