"""Log-probabilities of tokens, as the two endpoints of OpenAI write them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from openai.types.completion_choice import Logprobs

from paradec.constraints.spelling import spelling_of
from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.query import whole_rows
from paradec.models.requests import UNSHARED

IMPOSSIBLE = -9999.0
"""OpenAI's number for a token without a probability."""
MAX_LOGITS = 2**27
"""Logits of a prompt that are held at once."""


@dataclass
class TokenScore:
    """A token of a prompt or an answer."""

    token: int
    text: bytes
    offset: int
    """Whole characters of the text before it."""
    logprob: float | None
    """None for the first token of a prompt."""
    best: list[tuple[int, bytes, float]]
    """Ids, texts and log-probabilities of the likeliest tokens, in descending order."""


class TokenScores:
    """Collects the tokens of one text from left to right until their text is sent.

    Args:
        begin: characters of the text before them. keeps_special: list special tokens too, by their names.
    """

    def __init__(self, tokenizer: Any, begin: int = 0, keeps_special: bool = False):
        self._tokenizer, self._spelling, self._keeps_special = tokenizer, spelling_of(tokenizer), keeps_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = self.num_sent = begin
        """Characters of the text so far, and those that are sent."""
        self._before: int | None = None
        self._waiting: list[TokenScore] = []

    def add(self, ids: Sequence[int], scores: LogProbs | StepLogProbs) -> None:
        """Add tokens [N] and their scores [1, N]."""
        chosen, best, tokens = (part[0].tolist() for part in (scores.chosen, scores.best, scores.best_tokens))
        for index, token in enumerate(ids):
            pairs = [(other, value) for other, value in zip(tokens[index], best[index], strict=True) if other >= 0]
            named = [(other, self._text(other) or self._name(other), to_json(value)) for other, value in pairs]
            text = self._text(token)
            if text or self._keeps_special:
                logprob = None if self._keeps_special and math.isnan(chosen[index]) else to_json(chosen[index])
                self._waiting.append(TokenScore(token, text or self._name(token), self._offset, logprob, named))
                self._offset += len(self._decoder.decode(text))
                self._before = token if text else self._before

    def take(self, takes_all: bool = True) -> list[TokenScore]:
        """Remove and return the tokens, all of them or those that begin in the text that is sent."""
        end = math.inf if takes_all else self.num_sent
        count = next((n for n, score in enumerate(self._waiting) if score.offset >= end), len(self._waiting))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready

    def _text(self, token: int) -> bytes:
        """The bytes of a token after the last one; none of a special token."""
        if (spelling := self._spelling) is not None:
            place = 0 if self._before is None else spelling.after.get(self._before, 0)
            return spelling.texts[place].get(token, b"")
        before = [] if self._before is None else [self._before]
        first, both = (self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, [*before, token]))
        return str(both.removeprefix(first)).encode()

    def _name(self, token: int) -> bytes:
        return str(self._tokenizer.convert_ids_to_tokens(token)).encode()


def score_prompt(model: Any, ids: list[int], count: int) -> StepLogProbs:
    """Log-probabilities [1, P] of a prompt's tokens under a causal model, NaN for the first one."""
    parts, size = [], max(1, MAX_LOGITS // model.facts.vocab_size)
    with torch.inference_mode(), getattr(model, "requests", UNSHARED).slot.lock:
        for begin in range(0, len(ids), size):
            positions = [*range(begin, min(begin + size, len(ids)))]
            logits = model(whole_rows(model, [ids], [positions], [len(ids)]))
            tokens = torch.tensor([ids[begin : begin + size]], device=logits.device)
            parts.append(StepLogProbs.of_logits(logits, tokens, count))
    joined = StepLogProbs(*(torch.cat([getattr(part, name).cpu() for part in parts], 1) for name in NAMES))
    return joined.but(torch.arange(len(ids)).unsqueeze(0) == 0)


NAMES = ("chosen", "best", "best_tokens")


def to_json(value: float) -> float:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else IMPOSSIBLE


def name_of(text: bytes) -> str:
    """The name of a token: its text, or its bytes where they are no whole characters."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def entry(text: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": name_of(text), "logprob": logprob, "bytes": [*text]}

    content: Any = [
        entry(score.text, score.logprob) | {"top_logprobs": [entry(*best[1:]) for best in score.best]}
        for score in scores
    ]
    return {"content": content}


def text_logprobs(scores: Sequence[TokenScore]) -> Logprobs:
    """`logprobs` of a choice of /v1/completions; its keys are distinct."""
    tops: list[dict[str, float]] = []
    for score in scores:
        top: dict[str, float] = {}
        for token, text, logprob in score.best:
            name = name_of(text)
            top[f"token_id:{token}" if name in top else name] = logprob
        if top and score.logprob is not None and score.token not in [token for token, *_ in score.best]:
            name = name_of(score.text)
            top[f"token_id:{score.token}" if name in top else name] = score.logprob
        tops.append(top)
    return Logprobs.model_construct(
        text_offset=[score.offset for score in scores],
        token_logprobs=[score.logprob for score in scores],
        tokens=[name_of(score.text) for score in scores],
        top_logprobs=[None if score.logprob is None else top for score, top in zip(scores, tops)],
    )
