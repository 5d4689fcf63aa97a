"""Words that a tokenizer cannot express."""

from __future__ import annotations

from typing import Any

from paradec.core import packaged


def unknown_words(tokenizer: Any, text: str) -> ValueError:
    """The error that names the words of a text that a tokenizer cannot express; byte-level ones never have such."""
    unk = tokenizer.unk_token_id
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    plain = text
    for special in getattr(tokenizer, "get_added_vocab", dict)():  # those of a chat template are close to words
        plain = plain.replace(special, " ")
    words = sorted({w for w in plain.split() if unk in tokenizer(w, add_special_tokens=False)["input_ids"]})
    return ValueError(
        f"prompt has words outside the model's vocabulary: {', '.join(words) or text!r}"
        + packaged.advice(words, vocabulary)
    )
