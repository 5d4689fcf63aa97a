"""A small model of every family of images."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from image_models import tiny_chameleon, tiny_emu3, tiny_janus, tiny_llamagen

from paradec.models.images.base import ImageModel
from paradec.models.images.chameleon import ChameleonLayout

ANOLE = ChameleonLayout(start=40, end=41, side=3)
LUMINA = ChameleonLayout(start=40, end=41, side=2, row_end=42, end_of_text=2, first_size=50)
"""As Lumina-mGPT's, sizes included: 32 pixels are 4 tokens of the tiny model."""
CAPTIONS = [torch.linspace(-1, 1, length * 16).view(length, 16) for length in (5, 2)]
EMU3 = {"prompts": [[1, 12, 13, 9], [1, 11, 9]], "negative_prompt": [[1, 9]], "height": 24, "width": 32}
SIZED = {"prompts": [[1, 45, 2, 40, 51, 52], [1, 2, 40, 51, 52]], "height": 32, "width": 64}
MODELS: dict[str, tuple[Callable[[], ImageModel], dict[str, Any]]] = {
    "llamagen-c2i": (tiny_llamagen, {"class_labels": [3, 9]}),
    "llamagen-t2i": (lambda: tiny_llamagen("t2i"), {"prompts": CAPTIONS}),
    "emu3": (tiny_emu3, EMU3),
    "anole": (lambda: tiny_chameleon(ANOLE), {"prompts": [[1, 45, 46, 40], [1, 40]]}),
    "lumina-mgpt": (lambda: tiny_chameleon(LUMINA), SIZED),
    "janus": (tiny_janus, {"prompts": [[1, 20, 21, 9], [1, 30, 9]]}),
}


@lru_cache
def made(name: str) -> tuple[ImageModel, dict[str, Any]]:
    """The model, and a request of two rows with prompts of unequal lengths (where there are lengths)."""
    make, request = MODELS[name]
    return make(), request
