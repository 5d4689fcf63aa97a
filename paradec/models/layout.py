"""How the weights of a loaded model lie in memory on a CPU: column by column, and columns of neighbours not in step.

`nn.Linear` keeps its matrix [out, in] row by row, which the processor's library has to turn at every product. It reads
the columns, some lines of its caches of each. Where columns begin an even number of lines apart, and worst a power of
two (1,024 or 2,048 rows of float32), these lines compete for few places in the caches; an odd number spreads them over
all. Shapes, values and what is saved stay the same; sums are rounded in another order.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

LINE = 64
"""Bytes of a cache's line."""
STRIPE = 512
"""Rows that are turned at a time: what it takes beside the matrix and its copy."""


@torch.no_grad()
def lay_columns_first(module: nn.Module) -> None:
    """Let the matrices of plain linear layers lie column by column: those of float32 on a CPU that one layer alone has
    (an embedding reads rows, and what writes checkpoints finds out who shares a dense matrix only)."""
    readers = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    for part in module.modules():
        if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter or readers[id(part.weight)] > 1:
            continue
        if part.weight.device.type == "cpu" and part.weight.dtype == torch.float32:
            part.weight.data = columns_first(part.weight.data)


def columns_first(matrix: Tensor) -> Tensor:
    """The same matrix [M, N], column by column, an odd number of cache lines from one to the next."""
    rows, columns = matrix.shape
    step = LINE // matrix.element_size()
    lines = -(-rows // step)
    lines += 1 - lines % 2
    lying = matrix.new_empty(columns, lines * step)[:, :rows]
    for start in range(0, rows, STRIPE):
        lying[:, start : start + STRIPE] = matrix[start : start + STRIPE].t().contiguous()
    return lying.t()
