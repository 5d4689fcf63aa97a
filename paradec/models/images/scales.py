"""What a sampler asks of a model that predicts whole scales, and what comes back. Data alone; it knows neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def ends_of(scales: Sequence[int]) -> list[int]:
    """Tokens of all scales up to each: `L` in all."""
    return list(accumulate(side**2 for side in scales))


class ScaleStore:
    """Keys and values of the scales that are evaluated, one after the other; what follows them is not read.

    Its memory is 2 * layers * rows * heads * length * head_dim numbers, taken at the first call. The last scale's are
    never read, so that `length` leaves them out.
    """

    def __init__(
        self, layers: int, rows: int, heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.shape = (layers, 2, rows, heads, length, head_dim)
        self.dtype, self.device = dtype, device
        self.data: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def release(self) -> None:
        """Give the memory back."""
        self.data = None

    def extended(self, layer: int, begin: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, heads, begin + n, head_dim] of a layer: those before `begin`, and the new ones
        [R, heads, n, head_dim], which are written down where there is room."""
        if self.data is None:
            self.data = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        kept, stop = self.data[layer], begin + keys.shape[2]
        if stop <= kept.shape[3]:
            kept[0, :, :, begin:stop], kept[1, :, :, begin:stop] = keys, values
            return kept[0, :, :, :stop], kept[1, :, :, :stop]
        before = kept[:, :, :, :begin]
        return torch.cat((before[0], keys.to(self.dtype)), 2), torch.cat((before[1], values.to(self.dtype)), 2)


@dataclass
class ScaleQuery:
    """One call: the scales from `first` to `last`. `B` rows; under guidance (`branches == 2`) the model evaluates every
    row a second time, without its class. A token sees its own scale and all before."""

    rows: np.ndarray
    """[B] int64, on the host."""
    inputs: Tensor
    """[B, n, C]: the inputs of these scales, but for scale 0, whose input is the class."""
    labels: Tensor
    """[B] int64."""
    first: int
    last: int
    """The scale whose logits are wanted."""
    store: ScaleStore
    """Holds the scales before `first`; the call writes down what it evaluates."""
    branches: int = 1
    wanted: int = 1
    """Branches whose logits are wanted."""
    masked: bool = True
    """Whether scales do not see finer ones of the call."""
    drafting: bool = False
    """Whether it is for the model that drafts."""
    forwarded: np.ndarray | None = None
    """[B] int64, on the host: positions evaluated for each row in one branch."""
    kind: str = "window"
    positions: Tensor | None = field(default=None)
    """[B, n] int64: positions evaluated, for traces."""


@dataclass
class ScaleAnswer:
    """What comes back."""

    logits: Tensor
    """[wanted * B, n, V] of the last scale."""
    codes: Tensor
    """[V, C]: the codebook."""
    place: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor | None]]
    """(features [B, C, s, s], code vectors [B, n, C], scale) -> the features with them, and the next scale's input
    [B, n', C], None after the last."""
