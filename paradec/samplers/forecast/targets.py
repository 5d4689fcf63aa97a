"""Values of `Forecast(where=...)`: a part of a transformer, or modules by patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paradec.core.checks import check_choice, shown

PLACES = ("module", "block", "stack", "output")


@dataclass(frozen=True)
class Modules:
    """Modules by their names within the transformer.

    Args:
        modules: patterns (`re.fullmatch`) of modules whose outputs are forecast.
        skip: patterns of modules that are skipped at forecast steps: a forecast replaces everything that they feed.

    Raises:
        ValueError: no patterns, or an invalid one.
    """

    modules: tuple[str, ...]
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for setting in ("modules", "skip"):
            value = getattr(self, setting)
            patterns = (value,) if isinstance(value, str) else value
            if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
                names = "a regular expression for module names, or a list of them"
                raise ValueError(f"{setting}={shown(value)} must be {names}")
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{setting}={shown(pattern)} is no regular expression: {error}") from None
            object.__setattr__(self, setting, tuple(patterns))
        if not self.modules:
            raise ValueError(f"modules={shown(self.modules)} must name at least one module")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `where_from`."""
        return {key: list(patterns) for key, patterns in asdict(self).items()}


def where_from(value: Any) -> str | Modules | None:
    """A place from its name, a list of patterns, or `Modules` and its `to_dict`. Raises ValueError otherwise."""
    if value is None or isinstance(value, Modules):
        return value
    if isinstance(value, (list, tuple)):
        return Modules(tuple(value))
    if isinstance(value, Mapping) and {"modules"} <= set(value) <= {"modules", "skip"}:
        return Modules(**value)
    check_choice("where", value, PLACES)
    return str(value)
