"""Select, replace and clear rows of states, so that a batch stays full while its rows come and go.

A field of a dataclass that has rows says so in its metadata: `field(metadata=ROWS)`, or `row_layout(...)` where they
are not along the first axis, where there is a column for every position, or where rows that hold nothing are not zero.
Its value is an array on the host, a tensor, a list with an entry per row, another dataclass with such fields, a dict or
tuple of these (of a tuple's dataclasses one of each type), or None. Under guidance an axis may have the rows of
several branches, branch after branch.

A class with values that follow from its rows has methods for that: `before_row_change(other)`, before rows are
selected or cleared (`other` is None) or replaced by those of `other`, and `after_row_change()`, of the value that
results.
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
    """Where a field's values have their rows."""

    axis: int = 0
    """The axis of the rows."""
    columns: int | None = None
    """The axis with an entry for every position of the canvas; None where there is none."""
    fill: Any = 0
    """The value of rows and columns that hold nothing; in lists the entry."""
    shared: bool = False
    """Whether proposals hold the same tensor, so that it is never written to."""


Layout: TypeAlias = RowLayout | Callable[[Any, Any], RowLayout | None]
"""A field's layout, or a function that gives it for the owner and, in a dict, a part's key; None has no rows."""


def row_layout(axis: int = 0, columns: int | None = None, fill: Any = 0) -> dict[str, Layout]:
    """Metadata of a field with rows."""
    return {"rows": RowLayout(axis, columns, fill)}


ROWS = row_layout()
"""Metadata of a field with rows along the first axis, and nothing else to say of them."""


def has_rows(value: Any, batch: int | None = None) -> bool:
    """Whether rows of a value can be exchanged: an array or tensor of `batch` rows, or a dataclass that says of a field
    that it has rows."""
    if isinstance(value, (np.ndarray, Tensor)):
        return value.ndim > 0 and len(value) == batch
    return bool(_row_fields(value))


def count_rows(owner: Any) -> int:
    """The rows of a dataclass, or of its branches where the first of its values has these; 0 where it has none."""
    for value, layout in _values(owner):
        if isinstance(value, (np.ndarray, Tensor)):
            return value.shape[layout.axis]
        if count := len(value) if isinstance(value, list) else count_rows(value):
            return count
    return 0


def resize_axis(values: Values, size: int, fill: Any, axis: int = 1) -> Values:
    """Cut an axis off, or fill it up with `fill`; unchanged where it has this size."""
    count = values.shape[axis]
    if count == size:
        return values
    more = _full_like(values, axis, max(size - count, 0), fill)
    if isinstance(values, np.ndarray):
        return np.concatenate((values.take(np.arange(min(size, count)), axis), more), axis)
    return torch.cat((values.narrow(axis, 0, min(size, count)), more), axis)


def select_rows(owner: T, rows: np.ndarray, added_columns: int = 0) -> T:
    """Copy a state with the `rows` [N] alone, in this order; a row may be there several times.

    Args:
        added_columns: columns that the copy has more than the state; negative where it has fewer.
    """
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
        if (at := _layout_of(layout, owner, key)) is None:
            return value
        index = branch_rows(rows, count, value.shape[at.axis])
        if isinstance(value, np.ndarray):
            found: Any = value.take(index, at.axis)
        else:
            found = value.index_select(at.axis, torch.as_tensor(index, device=value.device))
        if at.columns is not None:
            found = resize_axis(found, found.shape[at.columns] + added_columns, at.fill, at.columns)
        return found

    for name, layout in _row_fields(owner).items():
        vars(other)[name] = select(getattr(owner, name), layout)
    _call_hook(other, "after_row_change")
    return other


def replace_rows(owner: T, slots: np.ndarray, other: T) -> None:
    """Replace the rows `slots` [N] of a state by all rows of another one, in place. What is larger in `other` grows,
    and what one of the two lacks is filled."""
    _exchange(owner, slots, other, _count_columns(owner) - _count_columns(other))


def clear_rows(owner: Any, slots: np.ndarray) -> None:
    """Fill the rows `slots` [N] of a state with what rows have that hold nothing, in place."""
    _exchange(owner, slots, None, 0)


def _exchange(owner: Any, slots: np.ndarray, other: Any, more: int) -> None:
    """`replace_rows`, with `more` columns in `owner` than in `other`; `clear_rows` where that is None."""
    _call_hook(owner, "before_row_change", other)
    count, other_count = count_rows(owner), count_rows(other)

    def exchange(own: Any, new: Any, layout: Layout, key: Any = None) -> Any:
        sample = new if own is None else own
        if sample is None:
            return None
        if isinstance(sample, (dict, tuple)):
            mine, theirs = _index_parts(own), _index_parts(new)
            made = {key: exchange(mine.get(key), theirs.get(key), layout, key) for key in mine | theirs}
            return made if isinstance(sample, dict) else tuple(made.values())
        if not isinstance(sample, (list, np.ndarray, Tensor)):
            if own is None:
                size = count_rows(new) * count // max(other_count, 1)
                own = select_rows(new, np.zeros(size, np.int64), more)
                clear_rows(own, np.arange(size))
            _exchange(own, branch_rows(slots, count, count_rows(own)), new, more)
            return own
        if (at := _layout_of(layout, owner, key)) is None:
            return own
        if isinstance(sample, list):
            own = [_copy_entry(at.fill) for _ in range(count)] if own is None else own
            for index, slot in enumerate(slots.tolist()):
                own[slot] = _copy_entry(at.fill if new is None else new[index])
            return own
        if own is None:
            own = _full_like(new, at.axis, count * new.shape[at.axis] // other_count, at.fill)
            own = own if at.columns is None else resize_axis(own, own.shape[at.columns] + more, at.fill, at.columns)
        elif at.shared:
            own = own.clone()
        return _exchange_values(own, branch_rows(slots, count, own.shape[at.axis]), new, at)

    for name, layout in _row_fields(owner).items():
        vars(owner)[name] = exchange(getattr(owner, name), getattr(other, name, None), layout)
    _call_hook(owner, "after_row_change")


def _exchange_values(own: Any, index: np.ndarray, new: Any, at: RowLayout) -> Any:
    """Replace the entries `index` of an axis by those of `new`, which may be smaller along the others; None fills."""
    inside: list[Any] = [slice(None)] * own.ndim
    for axis in range(own.ndim) if new is not None else ():
        if axis != at.axis:
            own = resize_axis(own, max(own.shape[axis], new.shape[axis]), at.fill, axis)
            inside[axis] = slice(new.shape[axis])
    rows: tuple[Any, ...] = (slice(None),) * at.axis
    if isinstance(own, np.ndarray):
        own[(*rows, index)] = at.fill
        if new is not None:
            own[tuple(inside)][(*rows, index)] = new
        return own
    where = torch.as_tensor(index, device=own.device)
    own.index_fill_(at.axis, where, at.fill)
    if new is not None:
        own[tuple(inside)].index_copy_(at.axis, where, new.to(own.device, own.dtype))
    return own


def _full_like(like: Values, axis: int, size: int, fill: Any) -> Values:
    """Nothing but `fill`, of another size along an axis."""
    shape = [*like.shape]
    shape[axis] = size
    return np.full(shape, fill, like.dtype) if isinstance(like, np.ndarray) else like.new_full(shape, fill)


def _row_fields(owner: Any) -> dict[str, Layout]:
    if not is_dataclass(owner):
        return {}
    return {each.name: each.metadata["rows"] for each in fields(owner) if "rows" in each.metadata}


def _values(owner: Any) -> Iterator[tuple[Any, Any]]:
    """The values of a dataclass's fields with rows, those of a dict one by one, and their layouts."""
    for name, layout in _row_fields(owner).items():
        value = getattr(owner, name)
        for key, part in value.items() if isinstance(value, dict) else [(None, value)]:
            if part is not None and (at := _layout_of(layout, owner, key)):
                yield part, at


def _count_columns(owner: Any) -> int:
    """The columns of the first value that has them; 0 where none has."""
    arrays = ((value, at) for value, at in _values(owner) if isinstance(value, (np.ndarray, Tensor)))
    return next((value.shape[at.columns] for value, at in arrays if at.columns is not None), 0)


def _layout_of(layout: Layout, owner: Any, key: Any) -> RowLayout | None:
    return layout if isinstance(layout, RowLayout) else layout(owner, key)


def _index_parts(value: dict[Any, Any] | tuple[Any, ...] | None) -> dict[Any, Any]:
    if isinstance(value, tuple):
        return {at if isinstance(part, Tensor) else type(part): part for at, part in enumerate(value)}
    return value or {}


def _copy_entry(entry: Any) -> Any:
    return [*entry] if isinstance(entry, list) else entry


def _call_hook(owner: Any, hook: str, *arguments: Any) -> None:
    if method := getattr(owner, hook, None):
        method(*arguments)
