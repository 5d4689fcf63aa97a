"""How the weights of a loaded model lie in memory on a CPU: in the file's own pages, or column by column.

`nn.Linear` keeps its matrix [out, in] row by row, which the processor's library has to turn at every product. It reads
the columns, some lines of its caches of each. Where columns begin an even number of lines apart, and worst a power of
two (1,024 or 2,048 rows of float32), these lines compete for few places in the caches; an odd number spreads them over
all. Shapes, values and what is saved stay the same; sums are rounded in another order.

What lies by columns is the process's own copy. Weights that transformers reads without converting them are pages of the
file, which take no time to read and which all processes share (see `SHARED_FROM`).
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

LINE = 64
"""Bytes of a cache's line."""
STRIPE = 512
"""Rows that are turned at a time: what it takes beside the matrix and its copy."""
LAYOUTS = ("rows", "columns")
SHARED_FROM = 64 * 2**20
"""Bytes of matrices in files from which on they stay there unless columns are asked for: laying so many takes some 20
to 40 forwards of one position to pay for itself, and of a block of positions 40 to more than 200."""


def lay(module: nn.Module, layout: str | None = None) -> None:
    """Let a module that was loaded lie as `load(weight_layout=...)` says.

    Args:
        layout: "columns" is `lay_columns_first`, after which nothing is in a file any more. "rows" changes nothing.
            None is "columns" but for matrices of more than `SHARED_FROM` bytes that lie in files.
    """
    matrices = _matrices(module)
    in_files = sum(part.weight.nbytes for part in matrices if _in_file(part.weight))
    if not matrices or layout == "rows" or (layout is None and in_files > SHARED_FROM):
        return
    lay_columns_first(module)
    _leave_files(module)


@torch.no_grad()
def lay_columns_first(module: nn.Module) -> None:
    """Let the matrices of plain linear layers lie column by column: those of float32 on a CPU that one layer alone has
    (an embedding reads rows, and what writes checkpoints finds out who shares a dense matrix only)."""
    for part in _matrices(module):
        part.weight.data = columns_first(part.weight.data)


def _matrices(module: nn.Module) -> list[nn.Linear]:
    """The layers whose matrices can lie column by column."""
    readers = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    found = []
    for part in module.modules():
        if type(part) is not nn.Linear or type(part.weight) is not nn.Parameter or readers[id(part.weight)] > 1:
            continue
        if part.weight.device.type == "cpu" and part.weight.dtype == torch.float32:
            found.append(part)
    return found


def _in_file(tensor: Tensor) -> bool:
    """Whether a tensor's memory is not torch's own: what safetensors reads are pages of the file."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return plain and not tensor.untyped_storage().resizable()


@torch.no_grad()
def _leave_files(module: nn.Module) -> None:
    """Copy what still lies in files: one tensor there keeps every page of its file in this process."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if _in_file(tensor):
            place = tensor.data_ptr(), tensor.shape
            if place not in copies:
                copies[place] = tensor.data.clone()
            tensor.data = copies[place]


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
