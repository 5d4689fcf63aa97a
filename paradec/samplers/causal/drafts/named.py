"""Drafters without a model: settings that have a name, and draft from the row's own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from paradec.core.checks import shown
from paradec.samplers.causal.state import CausalState


class NamedDrafter:
    """Base of these drafters, which are frozen dataclasses and `DraftSource`s."""

    name: ClassVar[str]
    kinds: ClassVar[dict[str, Any]] = {}
    """All of them by name."""

    def __init_subclass__(cls) -> None:
        NamedDrafter.kinds[cls.name] = cls

    def to_dict(self) -> dict[str, Any]:
        """The drafter as plain data; `of` is the inverse."""
        return {"drafter": self.name} | asdict(self)  # type: ignore[call-overload]

    @classmethod
    def of(cls, given: Any) -> Any:
        """What a sampler's setting `drafter` means: a name or a drafter's data make one, anything else is given back.

        Raises:
            ValueError: another name, or a setting that it does not have.
        """
        if isinstance(given, str):
            given = {"drafter": given}
        if not isinstance(given, Mapping):
            return given
        if (name := given.get("drafter")) not in cls.kinds:
            names = " or ".join(map(repr, sorted(cls.kinds)))
            raise ValueError(f"drafter={shown(name)} is no drafter's name; give a model, or {names}")
        try:
            return cls.kinds[name](**{key: value for key, value in given.items() if key != "drafter"})
        except TypeError as error:
            raise ValueError(f"drafter={shown(dict(given))}: {error}") from None

    def observe(self, state: CausalState, rows: np.ndarray, tokens: Tensor, logits: Tensor) -> None:
        """Called when a step over a tree has been committed.

        Args:
            tokens: [R, N] int64: what the step has evaluated of rows, -1 where nothing. logits: [R, N, V] after each.
        """
