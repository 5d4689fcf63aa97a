"""Select, replace and clear rows of states, so that a batch stays full while its rows change.

A dataclass field with rows is marked in its metadata: `field(metadata=ROWS)`, or `row_layout(...)` for another axis, an
axis of positions, or a fill other than 0. Its value is None, an array on the host, a tensor, a list with an entry per
row, another such dataclass, or a dict or tuple of these. A tuple may hold one dataclass of each type. Under guidance an
axis holds all rows of the first branch, then all rows of the second.

Classes with derived values may define two hooks. `before_row_change(other)` is called before rows are replaced by those
of `other`, or before rows are selected or cleared (`other` is None). `after_row_change()` is called on the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import branch_rows

T = TypeVar("T")
Values = TypeVar("Values", np.ndarray, Tensor)


@dataclass(frozen=True)
class RowLayout:
    """Axes of a field's rows and columns, and its fill."""

    axis: int = 0
    columns: int | None = None
    """The axis of canvas positions, if any."""
    fill: Any = 0
    """Value of empty rows and columns, or list entry of an empty row."""
    shared: bool = False
    """Whether proposals may hold the field's tensor itself, which is then copied before a write."""


Layout: TypeAlias = RowLayout | Callable[[Any, Any], RowLayout | None]
"""A field's layout, or a function (owner, key in a dict) that returns it; a result of None means no rows."""


def row_layout(axis: int = 0, columns: int | None = None, fill: Any = 0) -> dict[str, Layout]:
    return {"rows": RowLayout(axis, columns, fill)}


ROWS = row_layout()
"""Metadata of a field with rows along the first axis."""


def has_rows(value: Any, batch: int | None = None) -> bool:
    """Whether a value is an array of `batch` rows, or a dataclass with row fields."""
    if isinstance(value, (np.ndarray, Tensor)):
        return value.ndim > 0 and len(value) == batch
    return bool(_row_fields(value))


def count_rows(owner: Any) -> int:
    """Count the rows of a dataclass by its first row field, over all branches of that field; 0 without row fields."""
    for value, layout in _values(owner):
        if isinstance(value, (np.ndarray, Tensor)):
            return value.shape[layout.axis]
        if count := len(value) if isinstance(value, list) else count_rows(value):
            return count
    return 0


def resize_axis(values: Values, size: int, fill: Any, axis: int = 1) -> Values:
    """Cut an axis to `size`, or extend it with `fill`."""
    count = values.shape[axis]
    if count == size:
        return values
    filler = _full_like(values, axis, max(size - count, 0), fill)
    if isinstance(values, np.ndarray):
        return np.concatenate((values.take(np.arange(min(size, count)), axis), filler), axis)
    return torch.cat((values.narrow(axis, 0, min(size, count)), filler), axis)


def select_rows(owner: T, rows: np.ndarray, added_columns: int = 0) -> T:
    """Copy the `rows` [N] of a state, in this order; rows may repeat. The copy's axes of positions are longer by
    `added_columns` (negative: shorter)."""
    _call_hook(owner, "before_row_change", None)
    other, count = object.__new__(type(owner)), count_rows(owner)
    vars(other).update(vars(owner))

    def select(value: Any, layout: Layout, key: Any = None) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [_copy_entry(value[row]) for row in rows.tolist()]
        if isinstance(value, dict):
            return {key: select(part, layout, key) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(select(part, layout) for part in value)
        if not isinstance(value, (np.ndarray, Tensor)):
            return select_rows(value, branch_rows(rows, count, count_rows(value)), added_columns)
        if (axes := _layout_of(layout, owner, key)) is None:
            return value
        index = branch_rows(rows, count, value.shape[axes.axis])
        if isinstance(value, np.ndarray):
            selected: Any = value.take(index, axes.axis)
        else:
            selected = value.index_select(axes.axis, torch.as_tensor(index, device=value.device))
        if axes.columns is not None:
            selected = resize_axis(selected, selected.shape[axes.columns] + added_columns, axes.fill, axes.columns)
        return selected

    for name, layout in _row_fields(owner).items():
        vars(other)[name] = select(getattr(owner, name), layout)
    _call_hook(other, "after_row_change")
    return other


def replace_rows(owner: T, slots: np.ndarray, other: T) -> None:
    """Replace rows `slots` [N] of a state in place by all N rows of another. Smaller axes grow; gaps are filled."""
    _exchange(owner, slots, other, _count_columns(owner) - _count_columns(other))


def clear_rows(owner: Any, slots: np.ndarray) -> None:
    """Empty the rows `slots` [N] of a state in place."""
    _exchange(owner, slots, None, 0)


def _exchange(owner: Any, slots: np.ndarray, other: Any, added_columns: int) -> None:
    """Replace rows by those of `other`, which has `added_columns` fewer columns; clear them if `other` is None."""
    _call_hook(owner, "before_row_change", other)
    count, other_count = count_rows(owner), count_rows(other)

    def exchange(current: Any, new: Any, layout: Layout, key: Any = None) -> Any:
        sample = new if current is None else current
        if sample is None:
            return None
        if isinstance(sample, (dict, tuple)):
            parts, new_parts = _index_parts(current), _index_parts(new)
            exchanged = {key: exchange(parts.get(key), new_parts.get(key), layout, key) for key in parts | new_parts}
            return exchanged if isinstance(sample, dict) else tuple(exchanged.values())
        if not isinstance(sample, (list, np.ndarray, Tensor)):
            if current is None:
                size = count_rows(new) * count // max(other_count, 1)
                current = select_rows(new, np.zeros(size, np.int64), added_columns)
                clear_rows(current, np.arange(size))
            _exchange(current, branch_rows(slots, count, count_rows(current)), new, added_columns)
            return current
        if (axes := _layout_of(layout, owner, key)) is None:
            return current
        if isinstance(sample, list):
            current = [_copy_entry(axes.fill) for _ in range(count)] if current is None else current
            for index, slot in enumerate(slots.tolist()):
                current[slot] = _copy_entry(axes.fill if new is None else new[index])
            return current
        if current is None:
            current = _full_like(new, axes.axis, count * new.shape[axes.axis] // other_count, axes.fill)
            if axes.columns is not None:
                width = current.shape[axes.columns] + added_columns
                current = resize_axis(current, width, axes.fill, axes.columns)
        elif axes.shared:
            current = current.clone()
        return _exchange_values(current, branch_rows(slots, count, current.shape[axes.axis]), new, axes)

    for name, layout in _row_fields(owner).items():
        vars(owner)[name] = exchange(getattr(owner, name), getattr(other, name, None), layout)
    _call_hook(owner, "after_row_change")


def _exchange_values(values: Any, index: np.ndarray, new: Any, layout: RowLayout) -> Any:
    """Replace entries `index` of the row axis by `new`, which may be smaller along other axes, or by the fill."""
    region: list[Any] = [slice(None)] * values.ndim
    for axis in range(values.ndim) if new is not None else ():
        if axis != layout.axis:
            values = resize_axis(values, max(values.shape[axis], new.shape[axis]), layout.fill, axis)
            region[axis] = slice(new.shape[axis])
    rows: tuple[Any, ...] = (slice(None),) * layout.axis
    if isinstance(values, np.ndarray):
        values[(*rows, index)] = layout.fill
        if new is not None:
            values[tuple(region)][(*rows, index)] = new
        return values
    rows_index = torch.as_tensor(index, device=values.device)
    values.index_fill_(layout.axis, rows_index, layout.fill)
    if new is not None:
        values[tuple(region)].index_copy_(layout.axis, rows_index, new.to(values.device, values.dtype))
    return values


def _full_like(like: Values, axis: int, size: int, fill: Any) -> Values:
    shape = [*like.shape]
    shape[axis] = size
    return np.full(shape, fill, like.dtype) if isinstance(like, np.ndarray) else like.new_full(shape, fill)


def _row_fields(owner: Any) -> dict[str, Layout]:
    if not is_dataclass(owner):
        return {}
    return {entry.name: entry.metadata["rows"] for entry in fields(owner) if "rows" in entry.metadata}


def _values(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (value, layout) of a dataclass's row fields; a dict yields one pair per entry."""
    for name, layout in _row_fields(owner).items():
        value = getattr(owner, name)
        for key, part in value.items() if isinstance(value, dict) else [(None, value)]:
            if part is not None and (axes := _layout_of(layout, owner, key)):
                yield part, axes


def _count_columns(owner: Any) -> int:
    arrays = ((value, axes) for value, axes in _values(owner) if isinstance(value, (np.ndarray, Tensor)))
    return next((value.shape[axes.columns] for value, axes in arrays if axes.columns is not None), 0)


def _layout_of(layout: Layout, owner: Any, key: Any) -> RowLayout | None:
    return layout if isinstance(layout, RowLayout) else layout(owner, key)


def _index_parts(value: dict[Any, Any] | tuple[Any, ...] | None) -> dict[Any, Any]:
    if isinstance(value, tuple):
        return {index if isinstance(part, Tensor) else type(part): part for index, part in enumerate(value)}
    return value or {}


def _copy_entry(entry: Any) -> Any:
    return [*entry] if isinstance(entry, list) else entry


def _call_hook(owner: Any, hook: str, *arguments: Any) -> None:
    if method := getattr(owner, hook, None):
        method(*arguments)
