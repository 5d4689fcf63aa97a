"""paradec: fast sampling from models that need not decode one token at a time.

>>> import paradec
>>> model = paradec.load()                                       # the small model inside the package
>>> paradec.generate(model, "Sort: pear fig apple").text        # doctest: +SKIP
'apple fig pear'
"""

from __future__ import annotations

from paradec import caches, samplers
from paradec.blocks import FixedBlocks
from paradec.generate import Output, generate
from paradec.models.checkpoint import CheckpointError
from paradec.models.loading import load, wrap
from paradec.protocol import Interrupted, decode

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "FixedBlocks",
    "Interrupted",
    "Output",
    "caches",
    "decode",
    "generate",
    "load",
    "samplers",
    "wrap",
]
