"""An object that is another one in everything: what may replace a module's config."""

from __future__ import annotations

import copy
import operator
from typing import Any


class ConfigStandIn:
    """A config in everything but what a subclass says otherwise. Copies and pickles of it are copies of the config.

    Args:
        own: the config.
    """

    def __init__(self, own: Any):
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._own, name)

    def __repr__(self) -> str:
        return repr(self._own)

    def __eq__(self, other: object) -> bool:
        return self._own == (other._own if isinstance(other, ConfigStandIn) else other)

    def __hash__(self) -> int:
        return hash(self._own)

    def __copy__(self) -> Any:
        return copy.copy(self._own)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self._own,), 0)  # the config itself, and nothing of ours
