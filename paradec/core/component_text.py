"""Components as text: "credit", "credit(threshold=0.95)", "credit+localleap"."""

from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

from paradec.core.checks import short_repr

TERM = re.compile(r"(\w+\+*)\s*(\(.*\))?", re.DOTALL)
FILE_TERM = re.compile(r"([^()]+\.py:\w+)\s*(\(.*\))?", re.DOTALL)


class ParsedComponent(NamedTuple):
    name: str
    settings: dict[str, Any]


def parse_components(kind: str, text: str) -> list[ParsedComponent]:
    """Parse names joined by "+", each with or without settings in parentheses. A setting's value is a Python literal,
    or an unquoted word for a text. A "+" that no name follows belongs to the name before it: "lantern++(k=5)".
    kind: for messages. Raises ValueError for other texts."""
    try:
        terms: list[str] = []
        for part in split_outside(text, "+"):
            if terms and not re.match(r"\s*\w", part):
                terms[-1] += f"+{part}"
            else:
                terms.append(part)
        return [_parse_term(term) for term in terms]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise ValueError(
            f"{kind} {short_repr(text)} cannot be read; settings go in parentheses, each once, as Python literals or "
            f"words: 'name(setting=1)'" + ("; samplers are joined by '+'" if kind == "sampler" else "")
        ) from None


def parse_component(kind: str, text: str) -> ParsedComponent:
    """Parse one name with or without settings. Raises ValueError as `parse_components`."""
    components = parse_components(kind, text)
    if len(components) > 1:
        raise ValueError(f"{kind} {short_repr(text)} cannot be joined; give one name")
    return components[0]


def create_composed(registry: Any, name: str, settings: dict[str, Any]) -> Any:
    """Make a component as `Registry.create`; the text `name` may contain settings and join several names."""
    components = parse_components(registry.kind, name)
    if len(components) > 1 and "union" in registry:
        for setting in settings:
            raise ValueError(f"{setting}=...: give it to one of {name!r}, in parentheses: 'a({setting}=...)+b'")
        return registry.get("union")(rules=tuple(registry.create(part.name, **part.settings) for part in components))
    name, text_settings = parse_component(registry.kind, name)
    for setting in text_settings.keys() & settings:
        raise ValueError(f"{registry.kind} {name!r}: {setting!r} is given twice, in parentheses and as an argument")
    return registry.create(name, **text_settings, **settings)


def split_file(term: str) -> tuple[str, str] | None:
    """Split "FILE.py:CLASS(setting=1)" into the file with its class and the settings; None for other terms."""
    parts = FILE_TERM.fullmatch(term.strip())
    return None if parts is None else (parts[1], parts[2] or "")


def split_outside(text: str, separator: str) -> list[str]:
    """Split a text at a separator outside of brackets. Brackets in quoted texts do not count."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif depth > 0 and letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == separator and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse_term(term: str) -> ParsedComponent:
    parts = TERM.fullmatch(term.strip())
    call = ast.parse(f"settings{parts[2] or '()'}", mode="eval").body if parts else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args or parts is None:
        raise ValueError(term)
    settings: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in settings:
            raise ValueError(term)
        value = keyword.value  # a bare name is a text, since a shell removes quotes
        settings[keyword.arg] = value.id if isinstance(value, ast.Name) else ast.literal_eval(value)
    return ParsedComponent(parts[1], settings)
