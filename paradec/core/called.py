"""A name with settings in parentheses, as text: "dkv_decode(refresh_interval=4)"."""

from __future__ import annotations

import ast
from typing import Any

LONGEST_SHOWN = 76


def called(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of a text such as "name(a=1, b=some_text)".

    Args:
        kind: what is named ("cache"), for the message.

    Raises:
        ValueError: another form.
    """
    try:
        match ast.parse(text.strip(), mode="eval").body:
            case ast.Call(func=ast.Name(name), args=[], keywords=given):
                return name, call_settings(given)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    said = repr(text) if len(text) <= LONGEST_SHOWN else repr(text[:LONGEST_SHOWN]) + "..."
    raise ValueError(f"{kind} {said} cannot be read; settings go in parentheses, each once: 'name(setting=1)'")


def call_settings(given: list[ast.keyword]) -> dict[str, Any]:
    """The settings of a call: numbers, texts, None, True, False, or lists of these; a bare name is a text.

    Raises:
        TypeError, ValueError: another value, a setting without a name, or one that is given twice.
    """
    found: dict[str, Any] = {}
    for entry in given:
        if entry.arg is None or entry.arg in found:
            raise ValueError("settings have names, and each is given once")
        found[entry.arg] = entry.value.id if isinstance(entry.value, ast.Name) else ast.literal_eval(entry.value)
    return found
