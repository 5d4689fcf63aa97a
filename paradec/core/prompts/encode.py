"""From what users type (text, chat messages, ids, padded batches) to rows of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paradec.core.checks import check_bool
from paradec.core.prompts.ids import BYTES, from_ids, from_lists, is_rows_of_ids, tensor_of
from paradec.core.prompts.masks import check_placeholder
from paradec.core.prompts.processors import read_processed, with_pictures
from paradec.core.prompts.rows import Prompts, check_rows
from paradec.core.prompts.texts import from_messages, from_text


def encode(
    model: Any, prompt: Any, attention_mask: Any = None, chat: bool | None = None, placeholder: str | None = None
) -> Prompts:
    """Turn a prompt into rows of ids.

    Args:
        prompt: a string, a chat (list of {"role", "content"}), input ids (1-D or 2-D tensor, list of int), or a list of
            any one of these; or what a transformers tokenizer or processor returns, a mapping with "input_ids". Ids may
            hold the mask id anywhere (-1 for models with canvases). `Prompts` are returned as they are.
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        chat: whether a string becomes a user turn of the tokenizer's chat template; None does so when there is one.
        placeholder: text that means masks in texts and chats ("<mask>", and "<mask:3>" for three). Then strings
            are taken as they are unless `chat` is True, and an assistant's turn at the end of a chat is not closed by a
            new one.

    Raises:
        ValueError: an empty prompt or batch, ids outside the vocabulary, text without a tokenizer, a padding mask
            with holes, masks in text without a placeholder. TypeError: a prompt of another kind.
    """
    if isinstance(prompt, Prompts):
        return prompt
    if isinstance(prompt, Mapping):
        ids, mask = read_processed(prompt, attention_mask)
        return with_pictures(model, encode(model, ids, mask), prompt)
    if chat is not None:
        check_bool("chat", chat)
    if placeholder is not None:
        check_placeholder(placeholder)
    if isinstance(prompt, (Tensor, np.ndarray)):
        return from_ids(model, tensor_of("input ids", prompt), attention_mask)
    if attention_mask is not None and not is_rows_of_ids(prompt):
        raise ValueError("attention_mask goes with a 2-D tensor of input ids, not with text or unpadded rows")
    if isinstance(prompt, str):
        rows, single = [from_text(model, prompt, chat, placeholder)], True
    elif not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
        raise TypeError(f"prompt must be text, chat messages or input ids, not {type(prompt).__name__}")
    elif len(prompt) == 0:
        raise ValueError("prompt is empty; give at least one token, text or message")
    elif all(isinstance(item, str) for item in prompt):
        rows, single = [from_text(model, item, chat, placeholder) for item in prompt], False
    elif all(isinstance(item, dict) for item in prompt):
        rows, single = [from_messages(model, prompt, placeholder)], True
    elif all(isinstance(item, Sequence) and item and all(isinstance(m, dict) for m in item) for item in prompt):
        rows, single = [from_messages(model, item, placeholder) for item in prompt], False
    else:
        return from_lists(model, prompt, attention_mask)
    ids, starts = [row for row, _ in rows], [start for _, start in rows]
    check_rows(model, ids)
    mask = model.facts.mask_token_id
    for index, row in enumerate(ids):
        if placeholder is None and mask is not None and mask in row:
            raise ValueError(
                f"the prompt of row {index} holds the mask id {mask} at position {row.index(mask)}; "
                "paradec.infill fills masks in text"
            )
    return Prompts(ids, single, starts)
