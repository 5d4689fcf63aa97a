"""Models whose layers share modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from wrapped_models import IDS, Opaque

import paradec
from paradec.models.adapter import Model

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "bidirectional": {"topology": "bidirectional", "prediction": "same"},
    "block_causal": {"topology": "block_causal", "prediction": "shifted", "block_length": 4},
    "causal": {"topology": "causal", "prediction": "shifted"},
    "eager": {"topology": "bidirectional", "prediction": "same", "attn_implementation": "eager"},
}


class Dropping(Opaque):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.drop(torch.ones((), dtype=torch.float64))


def wrapping(kind: str, module: Any) -> Model:
    return paradec.wrap(module, **({} if kind == "encoder" else TOPOLOGIES["bidirectional"]), **IDS)
