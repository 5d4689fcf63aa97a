"""How the weights of a loaded model lie in memory on a CPU: column by column, for products with few positions.

Cached steps multiply a block of 4 to 64 positions with each matrix. `nn.Linear` keeps its matrix [out, in] row by row,
which the processor's library has to turn for such products at every call; column by column they take 0.4 to 0.9 of the
time in float32, and about as long with one position or some hundreds. Shapes, values and what is saved stay the same;
sums are rounded in another order.
"""

from __future__ import annotations

import torch
from torch import nn

MOST = 2**24
"""Weights of a matrix from which on reading them is what takes the time, however they lie."""


@torch.no_grad()
def lay_columns_first(module: nn.Module) -> None:
    """Let the matrices of plain linear layers lie column by column: those of float32 on a CPU with fewer than `MOST`
    weights that no other module reads (an embedding reads rows)."""
    read_by_others = {
        id(weight)
        for part in module.modules()
        if type(part) is not nn.Linear
        for weight in part.parameters(recurse=False)
    }
    for part in module.modules():
        if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter or id(part.weight) in read_by_others:
            continue
        weight = part.weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() < MOST:
            weight.data = weight.data.t().contiguous().t()
