"""What tokenizers and processors of transformers return, as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paradec.core.prompts.ids import tensor_of
from paradec.core.prompts.rows import Prompts

PROCESSED = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What processors return beside images; token types say nothing that ids do not."""
PASSED_OVER = ("special_tokens_mask", "offset_mapping", "length")
"""What tokenizers return when asked, and nothing here needs."""
PICTURED = ("pixel_values", "image_position_ids")


def read_processed(inputs: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Ids and attention mask of what a tokenizer or processor returns, which holds nothing else than is known."""
    ids, mask = _of_tokenizer(inputs, attention_mask)
    for name in sorted(map(str, inputs)):
        if name not in (*PROCESSED, *PICTURED, *PASSED_OVER):
            raise ValueError(f"prompt holds {name!r}; of a processor {', '.join((*PROCESSED, *PICTURED))} are taken")
    return ids, mask


def with_pictures(model: Any, prompts: Prompts, inputs: Mapping[str, Any]) -> Prompts:
    """The prompts with the embeddings of the images that a processor returned, at their tokens."""
    pictures = [inputs.get(name) for name in PICTURED]
    if hasattr(model, "embed_images"):
        prompts.images = model.embed_images(prompts.rows, *pictures)
    elif any(value is not None for value in pictures):
        raise ValueError(f"prompt holds pixel_values, and {model.facts.name} reads text alone")
    return prompts


def _of_tokenizer(encoding: Mapping[Any, Any], attention_mask: Any) -> tuple[Any, Any]:
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
    return (rows, masks) if rows is ids else (tensor_of("input ids", ids), tensor_of("attention_mask", mask))
