"""Rows of states: what is selected, replaced and cleared, of every form that a field's value may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.rows import ROWS, clear_rows, has_rows, replace_rows, row_layout, select_rows


@dataclass
class Part:
    flags: np.ndarray = field(metadata=ROWS)


@dataclass
class Owner:
    numbers: np.ndarray = field(metadata=ROWS)
    table: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    across: Tensor = field(metadata=row_layout(axis=1))
    words: list[list[int]] = field(metadata=row_layout(fill=[]))
    parts: tuple[Part, ...] = field(default=(), metadata=ROWS)
    branches: dict[str, Tensor] = field(default_factory=dict, metadata=row_layout(columns=1, fill=-1))
    missing: Tensor | None = field(default=None, metadata=row_layout(fill=7))


def owner(rows: int, columns: int, first: int = 0, **more: Any) -> Owner:
    numbers = np.arange(first, first + rows)
    table = torch.tensor(numbers)[:, None] * 100 + torch.arange(columns)
    return Owner(numbers, table, torch.tensor(numbers).tile(2, 1), [[int(number)] for number in numbers], **more)


def test_selected_rows_are_copies_with_other_columns() -> None:
    whole = owner(3, 2, parts=(Part(np.array([True, False, True])),), branches={"a": torch.arange(12).view(6, 2)})
    some = select_rows(whole, np.array([2, 0, 2]), added_columns=1)
    assert some.numbers.tolist() == [2, 0, 2] and some.across.tolist() == [[2, 0, 2]] * 2
    assert some.table.tolist() == [[200, 201, -1], [0, 1, -1], [200, 201, -1]] and some.missing is None
    assert some.parts[0].flags.tolist() == [True, True, True]
    assert some.branches["a"][:, 0].tolist() == [4, 0, 4, 10, 6, 10] and (some.branches["a"][:, 2] == -1).all()
    some.words[0].append(9)
    assert some.words == [[2, 9], [0], [2]] and whole.words == [[0], [1], [2]]
    assert select_rows(whole, np.array([1]), added_columns=-1).table.tolist() == [[100]]


def test_replaced_rows_fill_and_grow_what_one_of_the_two_lacks() -> None:
    whole, other = owner(3, 3), owner(1, 2, first=5, missing=torch.tensor([[1, 2]]))
    other.parts, other.branches = (Part(np.array([True])),), {"a": torch.full((2, 2), 4)}
    replace_rows(whole, np.array([1]), other)
    assert whole.numbers.tolist() == [0, 5, 2] and whole.words == [[0], [5], [2]]
    assert whole.table.tolist() == [[0, 1, 2], [500, 501, -1], [200, 201, 202]]
    assert whole.across.tolist() == [[0, 5, 2]] * 2 and whole.missing.tolist() == [[7, 7], [1, 2], [7, 7]]
    assert whole.parts[0].flags.tolist() == [False, True, False]
    expected = [[-1, -1, -1], [4, 4, -1], [-1, -1, -1]] * 2
    assert whole.branches["a"].tolist() == expected  # of both branches, with a column more
    replace_rows(whole, np.array([1]), owner(1, 4, first=8))
    assert whole.table.tolist() == [[0, 1, 2, -1], [800, 801, 802, 803], [200, 201, 202, -1]]
    assert whole.missing.tolist() == [[7, 7]] * 3 and not whole.parts[0].flags.any()


def test_cleared_rows_hold_nothing() -> None:
    whole = owner(3, 2, parts=(Part(np.ones(3, bool)),))
    clear_rows(whole, np.array([0, 2]))
    assert whole.numbers.tolist() == [0, 1, 0] and whole.words == [[], [1], []]
    assert whole.table.tolist() == [[-1, -1], [100, 101], [-1, -1]]
    assert whole.parts[0].flags.tolist() == [False, True, False]
    assert has_rows(whole) and has_rows(np.zeros(3), 3) and not has_rows(np.zeros(3), 2) and not has_rows("text")
