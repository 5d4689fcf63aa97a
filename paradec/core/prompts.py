"""Prompts: conversion of text, chat messages, ids and padded batches to rows of ids."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_bool
from paradec.core.facts import HOLE
from paradec.core.mask_text import HOLE_TEXT, check_placeholder, replace_placeholders
from paradec.core.packaged import unknown_words_error
from paradec.core.prompt_ids import (
    BYTES,
    embed_images,
    is_rows_of_ids,
    read_processed,
    rows_from_lists,
    rows_from_tensor,
    to_tensor,
)


@dataclass
class Prompts:
    """Rows of prompt ids without padding. single: whether the user gave one prompt rather than a batch."""

    rows: list[list[int]]
    single: bool
    starts: list[int]
    """Start of each row's last turn, for infilling."""
    copy_indices: list[int] | None = None
    """Set by `number_duplicates`: for each row, the number of equal rows before it in the whole request; else None."""
    images: list[Tensor | None] | None = None
    """For each row [number of image tokens, hidden size]: the embeddings of its image tokens; None without any."""
    joins_batch: bool = False
    """Whether the rows join a running batch."""

    def repeat(self, times: int) -> Prompts:
        """Repeat every row `times` times; copies are neighbours."""
        rows = [row for row in self.rows for _ in range(times)]
        starts = [start for start in self.starts for _ in range(times)]
        images = None if self.images is None else [part for part in self.images for _ in range(times)]
        return Prompts(rows, self.single and times == 1, starts, images=images)

    def number_duplicates(self) -> Prompts:
        """Set `copy_indices`, so that a slice of the rows has the same draws as in the whole request."""
        counters = defaultdict[tuple[int, ...], Any](itertools.count)
        return replace(self, copy_indices=[next(counters[row]) for row in map(tuple, self.rows)])

    def slice_rows(self, start: int, stop: int) -> Prompts:
        copy_indices = None if self.copy_indices is None else self.copy_indices[start:stop]
        images = None if self.images is None else self.images[start:stop]
        return Prompts(self.rows[start:stop], self.single, self.starts[start:stop], copy_indices, images)


def check_rows(model: Any, rows: list[list[int]]) -> None:
    """Raise ValueError for an empty row or an id outside the vocabulary."""
    vocab = model.facts.vocab_size
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt of row {index} is empty; give at least one token")
        low = 0 if model.facts.topology != "canvas" else HOLE
        if min(row) < low or max(row) >= vocab:
            wrong = next(i for i in row if i < low or i >= vocab)
            raise ValueError(f"input id {wrong} in row {index} is outside the vocabulary (0 to {vocab - 1})")


def align_right(tensor: Tensor, lengths: np.ndarray, fill: int | bool) -> Tensor:
    """Move the first `lengths` [B] entries of each row [B, L] to its last columns; the others get the value `fill`."""
    source = torch.arange(tensor.shape[1]) - (tensor.shape[1] - torch.as_tensor(lengths)).unsqueeze(1)
    return tensor.gather(1, source.clamp(min=0)).masked_fill(source < 0, fill)


def encode(
    model: Any, prompt: Any, attention_mask: Any = None, chat: bool | None = None, placeholder: str | None = None
) -> Prompts:
    """Turn a prompt into rows of ids.

    Args:
        prompt: a string, a chat (list of {"role", "content"}), input ids (1-D or 2-D tensor, list of int), a list of
            these, or the mapping with "input_ids" that a tokenizer or processor of transformers returns. Ids may
            include the mask id (-1 for models with canvases). `Prompts` are returned unchanged.
        attention_mask: [B, L] 0/1 for 2-D ids, padded on the left or on the right.
        chat: whether a string becomes a user turn of the chat template; None: if the tokenizer has a template.
        placeholder: text that stands for a mask in texts and chats ("<mask>", "<mask:3>" for three). With it, strings
            become user turns only if `chat` is True, and an assistant's turn at the end of a chat stays open.

    Raises ValueError for an empty prompt or batch, ids outside the vocabulary, text without a tokenizer, an attention
    mask with padding inside a row, or mask tokens in text without a placeholder; TypeError for other prompts.
    """
    if isinstance(prompt, Prompts):
        return prompt
    if isinstance(prompt, Mapping):
        ids, mask = read_processed(prompt, attention_mask)
        prompts = encode(model, ids, mask)
        prompts.images = embed_images(model, prompts.rows, prompt)
        return prompts
    if chat is not None:
        check_bool("chat", chat)
    if placeholder is not None:
        check_placeholder(placeholder)
    if isinstance(prompt, (Tensor, np.ndarray)):
        return _from_ids(model, *rows_from_tensor(to_tensor("input ids", prompt), attention_mask))
    if attention_mask is not None and not is_rows_of_ids(prompt):
        raise ValueError("attention_mask goes with a 2-D tensor of input ids, not with text or unpadded rows")
    if isinstance(prompt, str):
        rows, single = [encode_text(model, prompt, chat, placeholder)], True
    elif not isinstance(prompt, Sequence) or isinstance(prompt, BYTES):
        raise TypeError(f"prompt must be text, chat messages or input ids, not {type(prompt).__name__}")
    elif len(prompt) == 0:
        raise ValueError("prompt is empty; give at least one token, text or message")
    elif all(isinstance(item, str) for item in prompt):
        rows, single = [encode_text(model, item, chat, placeholder) for item in prompt], False
    elif all(isinstance(item, dict) for item in prompt):
        rows, single = [encode_chat(model, prompt, placeholder)], True
    elif all(isinstance(item, Sequence) and item and all(isinstance(m, dict) for m in item) for item in prompt):
        rows, single = [encode_chat(model, item, placeholder) for item in prompt], False
    else:
        return _from_ids(model, *rows_from_lists(prompt, attention_mask))
    ids, starts = [row for row, _ in rows], [start for _, start in rows]
    check_rows(model, ids)
    mask = model.facts.hole_id
    for index, row in enumerate(ids):
        if placeholder is None and mask is not None and mask in row:
            raise ValueError(
                f"the prompt of row {index} holds the mask id {mask} at position {row.index(mask)}; "
                "paradec.infill fills masks in text"
            )
    return Prompts(ids, single, starts)


def _from_ids(model: Any, rows: list[list[int]], single: bool) -> Prompts:
    check_rows(model, rows)
    return Prompts(rows, single, [0] * len(rows))


def encode_text(model: Any, text: str, chat: bool | None, placeholder: str | None) -> tuple[list[int], int]:
    """Encode a text. Returns its ids, and the start of its last turn."""
    tokenizer = _tokenizer(model)
    if not text.strip():
        raise ValueError(f"prompt={text!r} is empty; give at least one word")
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise ValueError("chat=True needs a tokenizer with a chat template; this one has none")
    if chat or (chat is None and placeholder is None and template):
        return encode_chat(model, [{"role": "user", "content": text}], placeholder)
    if placeholder is None:
        # a causal model was trained on texts with the tokenizer's special tokens
        return tokenize(tokenizer, text, special=model.facts.topology.startswith("causal")), 0
    # an encoder was trained on whole inputs with special tokens around them
    return tokenize(tokenizer, replace_placeholders(model, text, placeholder), special=model.kind == "encoder"), 0


def encode_chat(model: Any, messages: Sequence[dict[str, Any]], placeholder: str | None) -> tuple[list[int], int]:
    """Encode a chat. Returns its ids, and the start of its last turn."""
    tokenizer = _tokenizer(model)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat messages need a tokenizer with a chat template; this one has none")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {message!r} must have a text 'role' and a text 'content'")
    if placeholder is None:
        return tokenize(tokenizer, render_chat(tokenizer, messages)), 0
    messages = [{**m, "content": replace_placeholders(model, m["content"], placeholder)} for m in messages]
    if messages[-1]["role"] != "assistant":
        return tokenize(tokenizer, render_chat(tokenizer, messages)), 0
    ids = tokenize(tokenizer, render_chat(tokenizer, messages, open_turn=False))
    earlier_ids = tokenize(tokenizer, render_chat(tokenizer, messages[:-1])) if len(messages) > 1 else []
    # if the tokenizer merges tokens across turns, all turns count as the last one
    return ids, len(earlier_ids) if ids[: len(earlier_ids)] == earlier_ids else 0


def render_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], open_turn: bool = True, **variables: Any) -> str:
    """Render a chat as text, to be tokenized without special tokens. variables: further inputs of the template."""
    from jinja2 import TemplateError  # transformers' template engine

    try:
        text: str = tokenizer.apply_chat_template(
            [*messages], tokenize=False, add_generation_prompt=open_turn, **variables
        )
    except (TemplateError, TypeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"the tokenizer's chat template does not take these messages: {reason}") from error
    return text


def tokenize(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Tokenize a text; `special` adds special tokens. Raises ValueError for words without a token."""
    if HOLE_TEXT in text:  # the model has no mask token
        parts = [tokenize(tokenizer, part) if part else [] for part in text.split(HOLE_TEXT)]
        return [*parts[0], *(token for part in parts[1:] for token in (HOLE, *part))]
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise unknown_words_error(tokenizer, text)
    return ids


def _tokenizer(model: Any) -> Any:
    if model.tokenizer is None:
        raise ValueError(f"{model.facts.name} has no tokenizer; give input ids, or load(..., tokenizer=...)")
    return model.tokenizer
