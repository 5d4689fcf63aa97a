"""Copies and pickles of models."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class Copied:
    """A model whose copies and pickles hold a module of their own, with a wrap where the model has one, and no
    engines."""

    def __getstate__(self: Any) -> dict[str, Any]:
        # engines hold graphs and stores; the wrap is replaced by a flag that says whether there is one; the copy's own
        # requests are made when it has some
        kept = {name: value for name, value in self.__dict__.items() if name != "requests"}
        return kept | {"engines": OrderedDict(), "_wrap": self._wrap is not None}

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        wrapped = state["_wrap"]
        self.__dict__.update(state | {"_wrap": None})
        if self._unmasked:
            import paradec.models.attention  # noqa: F401  (a new process does not know the function yet)
        if wrapped:
            self._wrap = self._wrapped()
