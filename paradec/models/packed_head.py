"""The output matrix, packed for as long as one request runs, for float32 products with few positions on a CPU.

A product of a few hidden states with a large matrix spends much of its time bringing the matrix into the order that its
inner loops read. oneDNN can do that once. The packed copy is as large as the matrix, and is made for each request and
thread anew, so that it is never older than the request: weights may be changed between requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST = 4096
"""Words below which packing gains nothing."""
POSITIONS = 32
"""For how many positions a call the order is chosen; with others the product is right, too."""
PLAIN_CALLS = 1
"""Calls of a request before the matrix is packed, which takes as long as two or three of them: requests of one step
do without."""


class PackedHead:
    """One request's packed output matrix."""

    def __init__(self) -> None:
        self.calls = 0
        self.matrix: Tensor | None = None
        self._of: tuple[Any, ...] = ()

    def logits(self, hidden: Tensor, head: nn.Linear) -> Tensor | None:
        """hidden [..., D] float32 -> [..., V]; None where the plain product serves: the first calls, and what oneDNN
        does not take."""
        self.calls += 1
        if self.calls <= PLAIN_CALLS or not packs(head) or hidden.dtype != torch.float32:
            return None
        state = _state(head.weight)
        if self._of != state:
            try:
                self.matrix = torch.ops.mkldnn._reorder_linear_weight(head.weight.detach(), POSITIONS)
            except RuntimeError:  # not for this processor
                self.matrix = None
            self._of = state
        if self.matrix is None:
            return None
        found: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.matrix, head.bias, "none", [], "")
        return found


def packs(head: Any) -> bool:
    """Whether a module is a product that packing makes faster: a plain linear layer of float32 on a CPU, with many
    words. (With AVX-512 a matrix that lies column by column, as `load` lays it, is as fast as it is.)"""
    return (
        type(head) is nn.Linear
        and type(head.weight) is nn.Parameter
        and head.weight.is_cpu
        and head.weight.dtype == torch.float32
        and (head.weight.is_contiguous() or torch.backends.cpu.get_cpu_capability() != "AVX512")
        and head.out_features >= SMALLEST
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


def _state(weight: Tensor) -> tuple[Any, ...]:
    """What shows that a weight has been exchanged or changed in place."""
    return weight.data_ptr(), None if weight.is_inference() else weight._version


class HeadForward:
    """The forward of the output matrix in a tree of module objects of our own (`paradec.models.compiled`)."""

    def __init__(self, head: nn.Linear):
        self.head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        packed = None if _thread.packed is None else _thread.packed.logits(hidden, self.head)
        return nn.functional.linear(hidden, self.head.weight, self.head.bias) if packed is None else packed


class _Thread(threading.local):
    packed: PackedHead | None = None


_thread = _Thread()


@contextmanager
def packing() -> Iterator[None]:
    """In here this thread's calls may pack an output matrix; it goes with the end."""
    before, _thread.packed = _thread.packed, PackedHead()
    try:
        yield
    finally:
        _thread.packed = before
