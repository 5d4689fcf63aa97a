"""The golden mixtures of experts: small random checkpoints in the published formats, and what their published code
computes on them (`golden/moe/<name>/forwards.json`)."""

from __future__ import annotations

import functools
import json
from typing import Any

from places import GOLDEN

import paradec
from paradec.models.adapter import Model

MOE = GOLDEN / "moe"
NAMES = ("llada2-tiny", "llada-moe-tiny", "sdar-moe-tiny")
MASK = 95


@functools.cache
def forwards(name: str) -> dict[str, Any]:
    """`forwards.json` of a checkpoint."""
    return json.loads((MOE / name / "forwards.json").read_text())


def told(name: str) -> dict[str, Any]:
    """What `load` must be told, since the published config.json does not say it."""
    facts = forwards(name)["facts"]
    return {"mask_token_id": facts["mask"]} | ({"block_length": facts["block"]} if name == "llada2-tiny" else {})


@functools.cache
def golden_moe(name: str, dtype: str = "float32", block_length: int | None = None) -> Model:
    """A model that tests share."""
    block = {} if block_length is None else {"block_length": block_length}
    return paradec.load(MOE / name, dtype=dtype, **told(name) | block)
