"""Prompts of ids: tensors, lists, padded batches, and what tokenizers and processors return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

BYTES = (bytes, bytearray, memoryview)
"""Sequences of small integers that nobody means as ids."""


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
    """The rows of a tensor without its padding, and whether it is one row, [length], or a batch, [batch, length].

    Raises:
        TypeError, ValueError: another tensor, or a mask that does not fit it or has holes.
    """
    if not _is_integral(ids):
        raise TypeError(f"input ids have dtype {ids.dtype}; they must be integers")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"input ids have shape {tuple(ids.shape)}; expected [length] or [batch, length], not empty")
    single, ids = ids.ndim == 1, torch.atleast_2d(ids).cpu()
    keep = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = torch.atleast_2d(to_tensor("attention_mask", attention_mask)).cpu()
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {tuple(ids.shape)} as input ids")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold 0 (padding) and 1 (token) only")
        keep = mask.bool()
        if (keep.int().diff(dim=1).abs().sum(1) > 1).any():
            raise ValueError("attention_mask has holes; padding must be on the left or on the right of a row")
    return [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)], single


def rows_from_lists(prompt: Sequence[Any], attention_mask: Any) -> tuple[list[list[int]], bool]:
    """The same of a list of ids, or of rows of ids. Raises TypeError for a list of anything else."""
    if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in prompt):
        return [[int(i) for i in prompt]], True
    if is_rows_of_ids(prompt):
        if attention_mask is not None:
            if len({len(row) for row in prompt}) != 1:
                raise ValueError("attention_mask goes with rows of one length; unpadded rows need none")
            return rows_from_tensor(to_tensor("input ids", [list(map(int, row)) for row in prompt]), attention_mask)
        return [[int(i) for i in row] for row in prompt], False
    kinds = sorted({type(item).__name__ for item in prompt})
    raise TypeError(f"prompt mixes or holds items of type {kinds}; give texts, chats or rows of ids")


TEXT_FIELDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What processors return beside images; token types say nothing that ids do not."""


IGNORED_FIELDS = ("special_tokens_mask", "offset_mapping", "length")
"""What tokenizers return when asked, and nothing here needs."""


IMAGE_FIELDS = ("pixel_values", "image_position_ids")


def read_processed(inputs: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Ids and attention mask of what a tokenizer or processor returns, which holds nothing else than is known."""
    ids, mask = _read_tokenized(inputs, attention_mask)
    for name in sorted(map(str, inputs)):
        if name not in (*TEXT_FIELDS, *IMAGE_FIELDS, *IGNORED_FIELDS):
            raise ValueError(
                f"prompt holds {name!r}; of a processor {', '.join((*TEXT_FIELDS, *IMAGE_FIELDS))} are taken"
            )
    return ids, mask


def embed_images(model: Any, rows: list[list[int]], inputs: Mapping[str, Any]) -> list[Tensor | None] | None:
    """The embeddings of the images that a processor returned, at their tokens in each row; None on models without."""
    pictures = [inputs.get(name) for name in IMAGE_FIELDS]
    if hasattr(model, "embed_images"):
        return model.embed_images(rows, *pictures)
    if any(value is not None for value in pictures):
        raise ValueError(f"prompt holds pixel_values, and {model.facts.name} reads text alone")
    return None


def _read_tokenized(encoding: Mapping[Any, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Ids and attention mask of what a tokenizer returns (transformers' BatchEncoding), with tensors or lists in it.

    Raises:
        TypeError: another mapping. ValueError: two attention masks.
    """
    if "input_ids" not in encoding:
        hint = "; a message of a chat must be in a list" if {"role", "content"} <= {*encoding} else ""
        raise TypeError(f"prompt is a mapping without 'input_ids' (it has {sorted(map(str, encoding))}){hint}")
    ids, mask = encoding["input_ids"], encoding.get("attention_mask")
    if mask is not None and attention_mask is not None:
        raise ValueError("attention_mask is in the tokenizer's output too; give one")
    if isinstance(ids, (Tensor, np.ndarray)) or mask is None:
        return ids, attention_mask if mask is None else mask
    rows, masks = (ids, mask) if len(ids) and isinstance(ids[0], Sequence) else ([ids], [mask])
    if all(all(row) for row in masks):  # nothing is padded: rows may differ in length, and one needs no batch
        return ids, None
    return (rows, masks) if rows is ids else (to_tensor("input ids", ids), to_tensor("attention_mask", mask))
