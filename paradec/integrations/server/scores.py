"""Log-probabilities of an answer's tokens, as OpenAI's two endpoints write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from paradec.core.checks import shown
from paradec.core.logprobs import LogProbs
from paradec.integrations.server.asked import Refused

MOST = 20
"""Likeliest tokens that a client may ask for."""
NEVER = -9999.0
"""What OpenAI writes for a token that has no probability."""


@dataclass
class Score:
    """One token of an answer."""

    text: str
    start: int
    """Characters of the answer before it."""
    logprob: float
    best: list[tuple[str, float]] = field(default_factory=list)
    """Of the likeliest tokens, in descending order."""


class Scored(str):
    """A piece of text, and the tokens that it ends with or that came with it."""

    scores: list[Score]

    def __new__(cls, text: str, scores: list[Score]) -> Scored:
        """The piece."""
        made = super().__new__(cls, text)
        made.scores = scores
        return made


class Scores:
    """Tokens of one answer, from left to right, that wait for their text to be sent.

    Args:
        tokenizer: with a fast backend. special: whether special tokens are part of the text.
    """

    def __init__(self, tokenizer: Any, special: bool = False):
        self._tokenizer, self._decoder = tokenizer, DecodeStream([], skip_special_tokens=not special)
        self._waiting: list[Score] = []
        self._length, self._last = 0, list[int]()

    def feed(self, ids: Sequence[int], found: LogProbs) -> None:
        """Tokens [N] that follow, and what was said of them [1, N]."""
        chosen, best, tokens = (each[0].tolist() for each in (found.chosen, found.best, found.best_tokens))
        for at, token in enumerate(ids):
            text = self._decoder.step(self._tokenizer._tokenizer, token) or ""
            others = [
                (self._text(other), plain(value))
                for other, value in zip(tokens[at], best[at], strict=True)
                if other >= 0
            ]
            self._waiting.append(Score(text, self._length, plain(chosen[at]), others))
            self._length, self._last = self._length + len(text), [token]

    def until(self, length: int) -> list[Score]:
        """Take those whose text begins within so many characters of the answer."""
        count = next((at for at, score in enumerate(self._waiting) if score.start >= length), len(self._waiting))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready

    def _text(self, token: int) -> str:
        """A token's text after the last one: many tokenizers leave out a space at the beginning."""
        before, whole = self._tokenizer.decode(self._last), self._tokenizer.decode([*self._last, token])
        return str(whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode([token]))


def plain(value: float) -> float:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else NEVER


def of_chat(scores: Sequence[Score]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(score.text, score.logprob) | {"top_logprobs": [entry(*best) for best in score.best]}
            for score in scores
        ]
    }


def of_text(scores: Sequence[Score]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [dict(reversed(score.best)) for score in scores],
        "text_offset": [score.start for score in scores],
    }


def read_chat(body: Mapping[str, Any]) -> int | None:
    """How many likeliest tokens a chat asks for; None where it asks for no log-probabilities."""
    wanted, count = body.get("logprobs"), body.get("top_logprobs")
    if not isinstance(wanted or False, bool):
        raise Refused(f"logprobs={shown(wanted)} must be true or false", 422, "logprobs")
    if count is not None and not wanted:
        if count != 0 or isinstance(count, bool):
            raise Refused(f"top_logprobs={shown(count)} needs logprobs=true", 422, "top_logprobs")
        return None
    return _count("top_logprobs", count or 0) if wanted else None


def read_text(body: Mapping[str, Any]) -> int | None:
    """The same of /v1/completions, where `logprobs` is the number."""
    count = body.get("logprobs")
    return None if count is None or count is False else _count("logprobs", count)


def _count(name: str, count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST:
        raise Refused(f"{name}={shown(count)} must be an integer from 0 to {MOST}", 422, name)
    return count
