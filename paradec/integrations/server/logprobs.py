"""Log-probabilities of tokens in the formats of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paradec.constraints.spelling import find_spelling
from paradec.core.logprobs import NAMES, LogProbs, StepLogProbs

IMPOSSIBLE = -9999.0  # OpenAI's value for a token of probability 0


class TokenScore(NamedTuple):
    """A token: its bytes, log-probability, offset in the text (in characters). best: the position's top tokens."""

    token: int
    text: bytes
    logprob: float | None
    offset: int
    best: Sequence[TokenScore] = ()

    @property
    def name(self) -> str:
        """The token's text; its bytes in hexadecimal if they are not valid UTF-8."""
        try:
            return self.text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.text)

    def to_dict(self) -> dict[str, Any]:
        """Convert to an entry of `chat_logprobs`."""
        return {"token": self.name, "logprob": self.logprob, "bytes": [*self.text]}


class TokenScores:
    """Buffer of the scored tokens of one text, from left to right, until they are sent.

    begin: offset of the first token. markers: special tokens in the text. is_prompt: add tokens without text, too."""

    def __init__(self, tokenizer: Any, begin: int, markers: Mapping[int, str], is_prompt: bool = False):
        self._tokenizer, self._markers, self._is_prompt = tokenizer, markers, is_prompt
        self._spelling, self._decoder = find_spelling(tokenizer), codecs.getincrementaldecoder("utf-8")("replace")
        self._offset, self._last, self._waiting = begin, -1, list[TokenScore]()

    def add(self, ids: Sequence[int], scores: LogProbs | StepLogProbs) -> None:
        """Add tokens [N] and their scores [1, N]."""
        for token, logprob, *best in zip(ids, *(getattr(scores, name)[0].tolist() for name in NAMES)):
            if (text := self._text(token)) or self._is_prompt:
                likeliest = [self._score(other, value) for value, other in zip(*best) if other >= 0]
                self._waiting.append(self._score(token, logprob)._replace(best=likeliest))
                self._offset += len(self._decoder.decode(text))
                self._last = token if text else self._last

    def take(self, end: float = math.inf) -> list[TokenScore]:
        """Remove and return the tokens that begin before character `end`."""
        ready = [score for score in self._waiting if score.offset < end]
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _score(self, token: int, logprob: float) -> TokenScore:
        text = self._text(token) or str(self._tokenizer.convert_ids_to_tokens(token)).encode()
        missing = None if self._is_prompt and math.isnan(logprob) else IMPOSSIBLE  # None for a prompt's first token
        return TokenScore(token, text, logprob if math.isfinite(logprob) else missing, self._offset)

    def _text(self, token: int) -> bytes:
        """Return the bytes of a token that follows the last added one; empty for special tokens outside the text."""
        if token in self._markers:
            return self._markers[token].encode()
        if (spelling := self._spelling) is None:  # it is unknown how this tokenizer joins tokens
            return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()
        return spelling.texts[spelling.after.get(self._last, 0)].get(token, b"")


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Build `logprobs` of a choice of /v1/chat/completions."""
    return {"content": [score.to_dict() | {"top_logprobs": [s.to_dict() for s in score.best]} for score in scores]}


def text_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """Build `logprobs` of a choice of /v1/completions. Each entry of `top_logprobs` includes the token itself."""
    tops = list[dict[str, Any] | None]()
    for score in scores:
        top: dict[str, Any] = {}
        is_missing = score.token not in [best.token for best in score.best]
        for entry in [*score.best, score] if score.best and is_missing else score.best:
            top[f"token_id:{entry.token}" if entry.name in top else entry.name] = entry.logprob
        tops.append(None if score.logprob is None else top)
    columns = zip(*((score.name, score.logprob, score.offset) for score in scores))
    return {"top_logprobs": tops, **dict(zip(("tokens", "token_logprobs", "text_offset"), columns))}
