"""Confidences exactly at a threshold: whether a method compares with >= or >, in every dtype."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import paradec

MASK, END, VOCAB = 15, 14, 16
NEW = 8


class EvenOdds(nn.Module):
    """All probability on `num_best` tokens, shared evenly: [1], or [1, 2] with 1/2 each. Exact in every dtype."""

    def __init__(self, num_best: int, dtype: torch.dtype):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=64)
        self.num_best, self.dtype = num_best, dtype

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.full((*ids.shape, VOCAB), -1e4, dtype=self.dtype)
        logits[..., 1 : 1 + self.num_best] = 0
        return logits


AT_THRESHOLD = {
    "threshold": ({}, True),
    "wino": ({"threshold_back": 0.0}, False),
    "editing": ({"editing_threshold": 1.0}, False),
}
"""Settings beside `threshold`, and whether a confidence equal to it is taken (Fast-dLLM: yes; WINO, LLaDA2.1: no)."""


@pytest.mark.parametrize("name", AT_THRESHOLD)
@pytest.mark.parametrize("num_best", [1, 2])
@pytest.mark.parametrize("block_length", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_confidence_equal_to_the_threshold(name: str, num_best: int, block_length: int, dtype: torch.dtype) -> None:
    settings, inclusive = AT_THRESHOLD[name]
    model = paradec.wrap(
        EvenOdds(num_best, dtype), mask_token_id=MASK, eos_token_id=END, prediction="same", topology="bidirectional"
    )
    out = paradec.generate(
        model,
        [[5, 6], [5, 6, 7, 8, 9]],  # padding must not change what a row sees
        sampler=paradec.samplers.create(name, threshold=1 / num_best, **settings),
        max_new_tokens=NEW,
        block_length=block_length,
        trace=True,
    )
    assert out.trace is not None
    for row in range(2):
        changes = [[commit[1] for commit in step.commits if commit[0] == row] for step in out.trace.steps]
        first_written = len(changes[0])
        assert first_written == (block_length if inclusive else 1)
        assert sorted(position for step in changes for position in step) == list(range(2 + 3 * row, 2 + 3 * row + NEW))
