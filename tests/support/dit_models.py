"""The tiny DiT of tests/golden/diffusion."""

from __future__ import annotations

import json

import torch
from diffusers import (
    DiTTransformer2DModel,
)
from places import GOLDEN
from safetensors.torch import load_file
from torch import Tensor

TRACES = GOLDEN / "diffusion"


def tiny_dit(dtype: torch.dtype = torch.float32) -> DiTTransformer2DModel:
    module = DiTTransformer2DModel(**json.loads((TRACES / "golden_latents.json").read_text())["dit"]["transformer"])
    module.load_state_dict(load_file(TRACES / "golden_tiny_dit.safetensors"))
    return module.to(dtype).eval()


def noise(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 4, 8, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
