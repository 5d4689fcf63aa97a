"""Ids as users have them: tensors, arrays, lists, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.prompts.rows import Prompts, check_rows

BYTES = (bytes, bytearray, memoryview)
"""Sequences of small integers that nobody means as ids."""


def _of_ids(model: Any, rows: list[list[int]], single: bool) -> Prompts:
    check_rows(model, rows)
    return Prompts(rows, single, [0] * len(rows))


def is_rows_of_ids(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or len(prompt) == 0:
        return False
    return all(_is_row_of_ids(row) for row in prompt)


def _is_row_of_ids(row: Any) -> bool:
    if isinstance(row, Tensor):
        return row.ndim == 1 and _is_integral(row)
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and (row.dtype.kind in "iu" or row.size == 0)
    if not isinstance(row, Sequence) or isinstance(row, (str, *BYTES)):
        return False
    return all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in row)


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def tensor_of(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise TypeError(f"{name} of type {type(value).__name__} must be a tensor of integers: {reason}") from error


def from_ids(model: Any, ids: Tensor, attention_mask: Any) -> Prompts:
    if not _is_integral(ids):
        raise TypeError(f"input ids have dtype {ids.dtype}; they must be integers")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"input ids have shape {tuple(ids.shape)}; expected [length] or [batch, length], not empty")
    single, ids = ids.ndim == 1, torch.atleast_2d(ids).cpu()
    keep = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = torch.atleast_2d(tensor_of("attention_mask", attention_mask)).cpu()
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {tuple(ids.shape)} as input ids")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold 0 (padding) and 1 (token) only")
        keep = mask.bool()
        if (keep.int().diff(dim=1).abs().sum(1) > 1).any():
            raise ValueError("attention_mask has holes; padding must be on the left or on the right of a row")
    rows = [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)]
    return _of_ids(model, rows, single)


def from_lists(model: Any, prompt: Sequence[Any], attention_mask: Any) -> Prompts:
    """The prompts of a list of ids, or of a list of rows of ids; TypeError for a list of anything else."""
    if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in prompt):
        return _of_ids(model, [[int(i) for i in prompt]], True)
    if is_rows_of_ids(prompt):
        if attention_mask is not None:
            if len({len(row) for row in prompt}) != 1:
                raise ValueError("attention_mask goes with rows of one length; unpadded rows need none")
            return from_ids(model, tensor_of("input ids", [list(map(int, row)) for row in prompt]), attention_mask)
        return _of_ids(model, [[int(i) for i in row] for row in prompt], False)
    kinds = sorted({type(item).__name__ for item in prompt})
    raise TypeError(f"prompt mixes or holds items of type {kinds}; give texts, chats or rows of ids")
