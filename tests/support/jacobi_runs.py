"""Table models whose distributions are known, and what a method evaluates of them."""

from __future__ import annotations

from typing import Any

from scripts import load_script
from torch import Tensor

from paradec.models.images.grid import Grid

exactness = load_script("benchmarks/exactness.py")
TableModel = exactness.TableModel
GRID = Grid(3, 3, cells=range(2, 8), row_end=8, head=(0,), tail=(9, 1))


class Recording:
    """Passes everything on to a table model and notes the drafts that are evaluated."""

    def __init__(self) -> None:
        self.model, self.calls = TableModel.random(10, seed=4), []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Any, store: Any = None) -> Tensor:
        self.calls.append((query.positions, query.tokens))
        return self.model(query, store)
