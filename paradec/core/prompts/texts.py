"""Texts and chats as ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paradec.core.facts import HOLE
from paradec.core.prompts.masks import HOLE_TEXT, with_masks
from paradec.core.prompts.unknown import unknown_words


def from_text(model: Any, text: str, chat: bool | None, placeholder: str | None) -> tuple[list[int], int]:
    """The ids of a text, and where the text that a reader wants begins in them."""
    tokenizer = _tokenizer(model)
    if not text.strip():
        raise ValueError(f"prompt={text!r} is empty; give at least one word")
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise ValueError("chat=True needs a tokenizer with a chat template; this one has none")
    if chat or (chat is None and placeholder is None and template):
        return from_messages(model, [{"role": "user", "content": text}], placeholder)
    if placeholder is None:
        # a causal model was trained on what its tokenizer makes of a text, with the token that it begins with
        return ids_of(tokenizer, text, special=model.facts.topology == "causal"), 0
    # a masked language model was trained on whole inputs, with its special tokens around them
    return ids_of(tokenizer, with_masks(model, text, placeholder), special=model.kind == "encoder"), 0


def from_messages(model: Any, messages: Sequence[dict[str, Any]], placeholder: str | None) -> tuple[list[int], int]:
    """The ids of a chat, and where the text that a reader wants begins in them."""
    tokenizer = _tokenizer(model)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat messages need a tokenizer with a chat template; this one has none")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {message!r} must have a text 'role' and a text 'content'")
    if placeholder is None:
        return ids_of(tokenizer, _render(tokenizer, messages)), 0
    messages = [{**m, "content": with_masks(model, m["content"], placeholder)} for m in messages]
    if messages[-1]["role"] != "assistant":
        return ids_of(tokenizer, _render(tokenizer, messages)), 0
    ids = ids_of(tokenizer, _render(tokenizer, messages, open_turn=False))
    before = ids_of(tokenizer, _render(tokenizer, messages[:-1])) if len(messages) > 1 else []
    # a tokenizer may join the two ends; then the reader gets the turns before as well
    return ids, len(before) if ids[: len(before)] == before else 0


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]], open_turn: bool = True) -> str:
    """The chat as text: rendered before it is tokenized, so that no special token is added twice."""
    from jinja2 import TemplateError  # what transformers renders chat templates with

    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_turn)
    except (TemplateError, TypeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"the tokenizer's chat template does not take these messages: {reason}") from error


def ids_of(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The ids of a text, as a tokenizer has them, with its special tokens around it if wanted.

    Raises:
        ValueError: words that the tokenizer cannot express.
    """
    if HOLE_TEXT in text:  # of a model without a mask token
        parts = [ids_of(tokenizer, part) if part else [] for part in text.split(HOLE_TEXT)]
        return [*parts[0], *(token for part in parts[1:] for token in (HOLE, *part))]
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise unknown_words(tokenizer, text)
    return ids


def _tokenizer(model: Any) -> Any:
    if model.tokenizer is None:
        raise ValueError(f"{model.facts.name} has no tokenizer; give input ids, or wrap it with tokenizer=...")
    return model.tokenizer
