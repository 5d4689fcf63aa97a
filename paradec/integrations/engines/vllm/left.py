"""Models that predict shifted, as if they predicted in place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


class Left(nn.Module):
    """Hidden states one position to the left, so that logits are at the token that they predict.

    The left neighbour of a block's first position was evaluated in an earlier forward: the last hidden state that a
    request stored is kept. All buffers stay where they are, as CUDA graphs need it.

    Args:
        requests: S, slots of vLLM. tokens: N, the most in a batch. hidden: D.
    """

    kept: Tensor
    source: Tensor
    keep: Tensor

    def __init__(self, requests: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.requests = requests
        buffers = {
            "kept": torch.zeros((requests, hidden), dtype=dtype, device=device),  # [S, D]
            "source": torch.zeros(tokens, dtype=torch.int64, device=device),
            "keep": torch.zeros(requests, dtype=torch.int64, device=device),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def say(self, source: np.ndarray, kept: Mapping[int, int], total: int) -> None:
        """For the next forward: where the left neighbours are, [total] int64 of [hidden of the forward; kept], and
        which column of it each slot keeps."""
        keep = total + np.arange(self.requests)
        for number, column in kept.items():
            keep[number] = column
        self.source[:total].copy_(torch.from_numpy(np.maximum(source, 0)))
        self.keep.copy_(torch.from_numpy(keep))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        both = torch.cat((hidden, self.kept))
        self.kept.copy_(both.index_select(0, self.keep))
        return both.index_select(0, self.source[: len(hidden)])
