"""Fast sampling from models that can decode several tokens at a time.

>>> import paradec
>>> model = paradec.load()                                       # the small model inside the package
>>> paradec.generate(model, "Sort: pear fig apple").text        # doctest: +SKIP
'apple fig pear'

This module imports neither torch nor transformers: each public name is imported at its first use.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import paradec.core.interrupts as _interrupts  # noqa: F401 - first: the libraries below take seconds to import
from paradec import attention, caches, samplers  # noqa: F401 - each registers its components
from paradec.core.other_names import describe_missing_attribute as _describe_missing_attribute
from paradec.core.registry import read_stub as _read_stub
from paradec.core.version import __version__  # noqa: F401
from paradec.tools import traces  # noqa: F401 - registers the drawing functions

_MODULES = _read_stub(Path(__file__).with_suffix(".pyi"))
__all__ = sorted(_MODULES)

# the logger "paradec" is silent unless the program configures it
logging.getLogger("paradec").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        globals()[name] = value = getattr(importlib.import_module(_MODULES[name]), name)  # called once per name
        return value
    # `paradec.api.images.contact_sheet` works without `import paradec.api`
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"paradec.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"paradec.{name}":
                raise
    hint = _describe_missing_attribute(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __reduce_ex__(protocol: int) -> Any:
    """Pickle this module by its name, since functions of a script are pickled with their globals."""
    return importlib.import_module, (__name__,)
