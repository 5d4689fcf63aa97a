"""The key/value cache as an argument of transformers' modules, and a flag that paradec's attention functions set."""

from __future__ import annotations

import inspect
import threading
from functools import lru_cache
from typing import Any

from torch import nn

NAMES = ("cache", "past_key_values")
"""The argument's name in transformers from 5.24 on, and in earlier releases."""


def cache_argument(module: nn.Module) -> str | None:
    """Name of the argument of `forward` for a key/value cache, in the first class of the MRO that has one, or None."""
    cls: Any = type(module)
    return _find_argument(cls)


def cache_keyword(module: nn.Module, cache: Any) -> dict[str, Any]:
    """A key/value cache as a keyword argument of the module's forward."""
    return {cache_argument(module) or NAMES[0]: cache}


@lru_cache
def _find_argument(cls: type) -> str | None:
    for base in cls.__mro__:
        parameters = inspect.signature(vars(base)["forward"]).parameters if "forward" in vars(base) else {}
        for name in NAMES:
            if name in parameters:
                return name
    return None


class AttentionFlag:
    """A flag that the functions of `paradec.models.attention` set when they run."""

    value = False


class _Thread(threading.local):
    def __init__(self) -> None:  # runs once per thread; torch.compile would not guard a class attribute
        self.attention_flag = AttentionFlag()


thread = _Thread()
"""The current thread's flag (`thread.attention_flag`)."""
