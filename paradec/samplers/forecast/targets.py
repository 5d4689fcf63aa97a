"""Values of `Forecast(where=...)`: a part of a transformer, or modules by patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_choice, shown

PLACES = ("module", "block", "stack", "output")


@dataclass(frozen=True)
class Modules:
    """Modules by their names within the transformer. Raises ValueError for no patterns, or an invalid one.

    Args:
        modules: patterns (`re.fullmatch`) of modules whose outputs are forecast.
        skip: patterns of modules that are skipped at forecast steps: a forecast replaces everything that they feed.
    """

    modules: tuple[str, ...]
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for setting in ("modules", "skip"):
            value = getattr(self, setting)
            try:
                patterns = (value,) if isinstance(value, str) else tuple(value)
                for pattern in patterns:
                    re.compile(pattern + "")  # a TypeError unless it is a text
            except (TypeError, re.error) as error:
                expected = "a regular expression for module names, or a list of them"
                raise ValueError(f"{setting}={shown(value)} must be {expected}: {error}") from None
            object.__setattr__(self, setting, patterns)
        if not self.modules:
            raise ValueError("modules=() must name at least one module")

    def to_dict(self) -> dict[str, list[str]]:
        return {"modules": list(self.modules), "skip": list(self.skip)}


def where_from(value: Any) -> str | Modules | None:
    """Read a place's name, a list of patterns, or `Modules` and its `to_dict`. Raises ValueError otherwise."""
    if value is None or isinstance(value, Modules):
        return value
    if isinstance(value, (list, tuple)):
        return Modules(tuple(value))
    if isinstance(value, Mapping) and {"modules"} <= set(value) <= {"modules", "skip"}:
        return Modules(**value)
    check_choice("where", value, PLACES)
    return str(value)
