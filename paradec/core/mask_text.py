"""Masks in texts."""

from __future__ import annotations

import re
from typing import Any

from paradec.core.checks import check_int, short_repr

HOLE_TEXT = "\ufdd0"
"""Text of a position to fill, for models without a mask token: a Unicode noncharacter, which no text contains."""


MAX_MASKS = 1_000_000
"""Maximum number of masks for one placeholder, if the model has no length limit."""


def check_placeholder(placeholder: Any) -> None:
    """Raise ValueError unless `placeholder` is None or a text with a visible character."""
    if placeholder is not None and (not isinstance(placeholder, str) or not placeholder.strip()):
        raise ValueError(
            f"mask={short_repr(placeholder)} must be the text that represents a token to fill, e.g. '<mask>'"
        )


def replace_placeholders(model: Any, text: str, placeholder: str) -> str:
    """Replace each placeholder by mask tokens: "<mask>" by one, "<mask:3>" by three. A space before a placeholder is
    dropped, since tokenizers such as GPT-2's treat the space as part of the next word."""
    mask, tokenizer = model.facts.mask_token_id, model.tokenizer
    name = HOLE_TEXT if mask is None else tokenizer.convert_ids_to_tokens(mask)
    if mask is not None and (name is None or tokenizer(name, add_special_tokens=False)["input_ids"] != [mask]):
        raise ValueError(f"the tokenizer of {model.facts.name} has no text for the mask id {mask}; give input_ids")

    def masks(match: re.Match[str]) -> str:
        count = int(match["count"] or 1)
        check_int(f"count of {match[0].strip()!r}", count, low=1, high=model.facts.max_length or MAX_MASKS)
        return name * count

    last_letter = placeholder[-1]
    count = r"(?::(?P<count>[0-9]+))?" if last_letter in ")]}>" else r"(?P<count>(?!))?"
    return re.sub(" ?" + re.escape(placeholder[:-1]) + count + re.escape(last_letter), masks, text)
