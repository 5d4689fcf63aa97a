"""Prompts of ids: tensors, lists, padded batches, and outputs of tokenizers and processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

BYTES = (bytes, bytearray, memoryview)
"""Types whose items are integers but not token ids."""


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


def to_tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise TypeError(f"{name} of type {type(value).__name__} must be a tensor of integers: {reason}") from error


def rows_from_tensor(ids: Tensor, attention_mask: Any) -> tuple[list[list[int]], bool]:
    """Split a tensor into rows without padding. Also returns whether its shape is [length] rather than [batch, length].
    Raises TypeError or ValueError for wrong dtypes or shapes, and for a mask with padding inside a row."""
    if not _is_integral(ids):
        raise TypeError(f"input ids have dtype {ids.dtype}; they must be integers")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"input ids have shape {tuple(ids.shape)}; expected [length] or [batch, length], not empty")
    single, ids = ids.ndim == 1, torch.atleast_2d(ids).cpu()
    is_token = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = torch.atleast_2d(to_tensor("attention_mask", attention_mask)).cpu()
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {tuple(ids.shape)} as input ids")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold 0 (padding) and 1 (token) only")
        is_token = mask.bool()
        if (is_token.int().diff(dim=1).abs().sum(1) > 1).any():
            raise ValueError("attention_mask has holes; padding must be on the left or on the right of a row")
    return [row[row_mask].tolist() for row, row_mask in zip(ids, is_token, strict=True)], single


def rows_from_lists(prompt: Sequence[Any], attention_mask: Any) -> tuple[list[list[int]], bool]:
    """Convert a list of ids, or of rows of ids, to rows. Also returns whether it is a list of ids. Raises TypeError for
    other items, ValueError for an attention mask of unequal rows, and as `rows_from_tensor`."""
    if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in prompt):
        return [[int(i) for i in prompt]], True
    if is_rows_of_ids(prompt):
        if attention_mask is not None:
            if len({len(row) for row in prompt}) != 1:
                raise ValueError("attention_mask goes with rows of one length; unpadded rows need none")
            return rows_from_tensor(to_tensor("input ids", [list(map(int, row)) for row in prompt]), attention_mask)
        return [[int(i) for i in row] for row in prompt], False
    kinds = sorted({type(item).__name__ for item in prompt})
    raise TypeError(f"prompt holds items of types {kinds}; give texts, chats or rows of ids")


TEXT_FIELDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
IGNORED_FIELDS = ("special_tokens_mask", "offset_mapping", "length")
IMAGE_FIELDS = ("pixel_values", "image_position_ids")


def read_processed(inputs: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Read ids and attention mask from the output of a tokenizer or processor. Raises ValueError for unknown fields."""
    ids, mask = _read_tokenized(inputs, attention_mask)
    for name in sorted(map(str, inputs)):
        if name not in (*TEXT_FIELDS, *IMAGE_FIELDS, *IGNORED_FIELDS):
            raise ValueError(
                f"prompt holds {name!r}; a processor's output may have {', '.join((*TEXT_FIELDS, *IMAGE_FIELDS))}"
            )
    return ids, mask


def embed_images(model: Any, rows: list[list[int]], inputs: Mapping[str, Any]) -> list[Tensor | None] | None:
    """Embed a processor's images, for the image tokens of each row; None for models without image inputs."""
    values = [inputs.get(name) for name in IMAGE_FIELDS]
    if hasattr(model, "embed_images"):
        return model.embed_images(rows, *values)
    if any(value is not None for value in values):
        raise ValueError(f"prompt holds pixel_values, and {model.facts.name} reads only text")
    return None


def _read_tokenized(encoding: Mapping[Any, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Read ids and attention mask from a tokenizer's output (BatchEncoding), as tensors or lists. Raises TypeError for
    a mapping without ids, ValueError for two masks."""
    if "input_ids" not in encoding:
        hint = "; a message of a chat must be in a list" if {"role", "content"} <= {*encoding} else ""
        raise TypeError(f"prompt is a mapping without 'input_ids' (it has {sorted(map(str, encoding))}){hint}")
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    if mask is not None and attention_mask is not None:
        raise ValueError("attention_mask is in the tokenizer's output too; give one")
    if isinstance(ids, (Tensor, np.ndarray)) or mask is None:
        return ids, attention_mask if mask is None else mask
    rows, masks = (ids, mask) if len(ids) and isinstance(ids[0], Sequence) else ([ids], [mask])
    if all(all(row) for row in masks):  # nothing is padded: rows may differ in length, and a single row needs no batch
        return ids, None
    return (rows, masks) if rows is ids else (to_tensor("input ids", ids), to_tensor("attention_mask", mask))
