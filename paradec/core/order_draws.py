"""Where an order takes its random choices from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from paradec.core import rng


class OrderDraws(Protocol):
    """Where an order takes a row's random choices from. Asked again, it answers the same."""

    def shuffled(self, step: int, cells: np.ndarray) -> np.ndarray:
        """`cells` [N] int64 in a random order, at this group."""
        ...

    def one_of(self, step: int, cells: np.ndarray) -> int:
        """One of `cells` [N] int64, at this group."""
        ...


@dataclass(frozen=True)
class KeyedDraws:
    """Draws that are a function of a row's key, the group and the cell (`paradec.core.rng`). key: two 32-bit
    integers."""

    key: tuple[int, int]

    def shuffled(self, step: int, cells: np.ndarray) -> np.ndarray:
        return cells[self._numbers(step, cells)[:, 0].argsort(kind="stable")[::-1]]

    def one_of(self, step: int, cells: np.ndarray) -> int:
        return int(cells[self._numbers(step, cells)[:, 1].argmax()])

    def _numbers(self, step: int, cells: np.ndarray) -> np.ndarray:
        key, at = torch.tensor([self.key]), torch.as_tensor(np.array(cells)).unsqueeze(0)
        return rng.uniform(key, torch.tensor([step]), at, 2, rng.POSITION_STREAM)[0].numpy()


def keyed(keys: Any) -> list[OrderDraws]:
    """Draws of every row, from its key: [B, 2] int64."""
    return [KeyedDraws((int(first), int(second))) for first, second in keys.tolist()]


ONE: Sequence[OrderDraws] = (KeyedDraws((0, 0)),)
"""Of a single row."""
