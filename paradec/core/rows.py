"""Rows that leave a batch and rows that take their place: what states, stores and memories do this with.

Everything that a state keeps for each of its rows is an array on the host or a tensor, with the rows along one axis;
some have a column for every position of the canvas besides. `taken` picks rows, `put` replaces them, `fitted` changes
the number of columns. What keeps rows in another form (a cache's record, a stop rule) has methods `taken(rows,
columns)` and `put(slots, other)` of its own.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

Values = TypeVar("Values", np.ndarray, Tensor)


@runtime_checkable
class Rows(Protocol):
    """Something that keeps rows in a form of its own."""

    def taken(self, rows: np.ndarray, columns: int | None = None) -> Any:
        """A copy that has the `rows` [N] alone, in this order (a row may be there several times), with so many
        columns."""
        ...

    def put(self, slots: np.ndarray, other: Any) -> None:
        """Replace the rows `slots` [N] by all rows of another one, which has as many columns at most."""
        ...


def taken(values: Values, rows: np.ndarray, axis: int = 0) -> Values:
    """A copy that has the `rows` [N] of an axis alone."""
    if isinstance(values, np.ndarray):
        return values.take(rows, axis)
    return values.index_select(axis, torch.as_tensor(rows, device=values.device))


def put(values: np.ndarray | Tensor, slots: np.ndarray, other: Any, axis: int = 0) -> None:
    """Replace `slots` [N] of an axis by the N entries of `other`, in place."""
    if isinstance(values, np.ndarray):
        values[(slice(None),) * axis + (slots,)] = other
    else:
        index = torch.as_tensor(slots, device=values.device)
        values.index_copy_(axis, index, other.to(values.device, values.dtype))


def fitted(values: Values, size: int, fill: Any, axis: int = 1) -> Values:
    """With so many entries along an axis: cut off, or filled up with `fill`."""
    count = values.shape[axis]
    if count == size:
        return values
    if isinstance(values, np.ndarray):
        if count > size:
            return values.take(np.arange(size), axis)
        shape = [*values.shape]
        shape[axis] = size - count
        return np.concatenate((values, np.full(shape, fill, values.dtype)), axis)
    if count > size:
        return values.narrow(axis, 0, size).clone()
    shape = [*values.shape]
    shape[axis] = size - count
    return torch.cat((values, values.new_full(shape, fill)), axis)


def kept(value: Any, rows: np.ndarray, columns: int | None) -> Any:
    """`taken` of what a method or cache keeps in a form that is known here, or in one of its own; None stays None."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return taken(value, rows)
    return taken(value, rows) if isinstance(value, Tensor) else value.taken(rows, columns)


def exchange(value: Any, slots: np.ndarray, other: Any) -> None:
    """`put` of the same."""
    if value is None:
        return
    if isinstance(value, (np.ndarray, Tensor)):
        put(value, slots, other)
    else:
        value.put(slots, other)


def exchangeable(value: Any, batch: int) -> bool:
    """Whether `kept` and `exchange` can take it: nothing, an array or tensor of `batch` rows, or `Rows`."""
    if value is None:
        return True
    if isinstance(value, (np.ndarray, Tensor)):
        return value.ndim > 0 and len(value) == batch
    return isinstance(value, Rows)
