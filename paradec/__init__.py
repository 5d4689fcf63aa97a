"""paradec: fast sampling from models that need not decode one token at a time.

>>> import paradec
>>> model = paradec.load()                                       # the small model inside the package
>>> paradec.generate(model, "Sort: pear fig apple").text        # doctest: +SKIP
'apple fig pear'

Importing it imports neither torch nor transformers: what is below is imported when it is first used.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import paradec.interrupts as _interrupts  # noqa: F401 - first: the libraries below take seconds to import
from paradec import attention, caches, samplers, traces  # noqa: F401 - which register what they have
from paradec.version import __version__  # noqa: F401

if TYPE_CHECKING:
    from paradec.attention.sparsed import SparseD
    from paradec.blocks import AdaptiveBlocks, FixedBlocks, PipelinedBlocks
    from paradec.estimation.estimate import estimate
    from paradec.generate import Output, generate, infill
    from paradec.hf import hf_generate
    from paradec.hooks.session import accelerate
    from paradec.images import generate_images
    from paradec.many import generate_many
    from paradec.models.checkpoint import CheckpointError
    from paradec.models.eagle import load_drafter
    from paradec.models.loading import load
    from paradec.models.proteins.mpnn import load_protein_mpnn
    from paradec.models.wrapping import wrap
    from paradec.protocol import Interrupted, decode
    from paradec.request import Request
    from paradec.samplers.forecast.taylorseer import TaylorSeer
    from paradec.samplers.masked.prophet import Prophet
    from paradec.suffix import Suffix
    from paradec.tuning.run import tune

# what the logger "paradec" says is for those who ask for it
logging.getLogger("paradec").addHandler(logging.NullHandler())

__all__ = [
    "AdaptiveBlocks",
    "CheckpointError",
    "FixedBlocks",
    "Interrupted",
    "Output",
    "PipelinedBlocks",
    "Prophet",
    "Request",
    "SparseD",
    "Suffix",
    "TaylorSeer",
    "accelerate",
    "attention",
    "caches",
    "decode",
    "estimate",
    "generate",
    "generate_images",
    "generate_many",
    "hf_generate",
    "infill",
    "load",
    "load_drafter",
    "load_protein_mpnn",
    "samplers",
    "tune",
    "wrap",
]


LATER = {
    "AdaptiveBlocks": "paradec.blocks",
    "CheckpointError": "paradec.models.checkpoint",
    "FixedBlocks": "paradec.blocks",
    "Interrupted": "paradec.protocol",
    "Output": "paradec.generate",
    "PipelinedBlocks": "paradec.blocks",
    "Prophet": "paradec.samplers.masked.prophet",
    "Request": "paradec.request",
    "SparseD": "paradec.attention.sparsed",
    "Suffix": "paradec.suffix",
    "TaylorSeer": "paradec.samplers.forecast.taylorseer",
    "accelerate": "paradec.hooks.session",
    "decode": "paradec.protocol",
    "estimate": "paradec.estimation.estimate",
    "generate": "paradec.generate",
    "generate_images": "paradec.images",
    "generate_many": "paradec.many",
    "hf_generate": "paradec.hf",
    "infill": "paradec.generate",
    "load": "paradec.models.loading",
    "load_drafter": "paradec.models.eagle",
    "load_protein_mpnn": "paradec.models.proteins.mpnn",
    "tune": "paradec.tuning.run",
    "wrap": "paradec.models.wrapping",
}
"""Imported when they are first asked for: all of them import torch, some of them parts of transformers."""


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    # a module, as if it had been imported by its name: `paradec.images.contact_sheet`
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"paradec.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"paradec.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This module. `paradec.generate` is the function, also once the module of that name has been imported, which
    Python would put in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generate" and isinstance(value, ModuleType):
            value = value.generate
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)  # functions of a script are pickled with what they refer to


sys.modules[__name__].__class__ = _Package
