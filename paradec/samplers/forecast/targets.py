"""Values of `Forecast(where=...)`: a part of a transformer, or modules by patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_choice, short_repr

PLACES = ("module", "block", "stack", "output")


@dataclass(frozen=True)
class Modules:
    """Patterns of module names within the transformer. Raises ValueError for no pattern or an invalid one.

    Args:
        modules: patterns (`re.fullmatch`) of modules whose outputs are forecast.
        skip: patterns of modules that are not evaluated at forecast steps. Only `modules` may use their outputs.
    """

    modules: tuple[str, ...]
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for setting in ("modules", "skip"):
            value = getattr(self, setting)
            try:
                patterns = (value,) if isinstance(value, str) else tuple(value)
                for pattern in patterns:
                    re.compile(pattern + "")  # TypeError unless it is a string
            except (TypeError, re.error) as error:
                expected = "a regular expression for module names, or a list of them"
                raise ValueError(f"{setting}={short_repr(value)} must be {expected}: {error}") from None
            object.__setattr__(self, setting, patterns)
        if not self.modules:
            raise ValueError("modules=() must name at least one module")

    def to_dict(self) -> dict[str, list[str]]:
        return {"modules": list(self.modules), "skip": list(self.skip)}


def where_from(value: Any) -> str | Modules | None:
    """Read the setting `where`: a name of `PLACES`, a list of patterns, `Modules` or its `to_dict`; else ValueError."""
    if value is None or isinstance(value, Modules):
        return value
    if isinstance(value, (list, tuple)):
        return Modules(tuple(value))
    if isinstance(value, Mapping) and {"modules"} <= set(value) <= {"modules", "skip"}:
        return Modules(**value)
    check_choice("where", value, PLACES)
    return str(value)
