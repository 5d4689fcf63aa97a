"""Log-probabilities of tokens, as the two endpoints of OpenAI write them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paradec.constraints.spelling import spelling_of
from paradec.core.family_queries import build_rows_query
from paradec.core.logprobs import NAMES, LogProbs, StepLogProbs
from paradec.core.weights import weights_lock

IMPOSSIBLE = -9999.0  # OpenAI's number for a token without a probability
MAX_LOGITS = 2**27  # logits of a prompt that are held at once


class TokenScore(NamedTuple):
    """A token, its bytes and log-probability, where it begins in the text (in characters), and the likeliest tokens."""

    token: int
    text: bytes
    logprob: float | None
    offset: int
    best: Sequence[TokenScore] = ()

    @property
    def name(self) -> str:
        """Its text, or its bytes where they are no whole characters."""
        try:
            return self.text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.text)

    def to_dict(self) -> dict[str, Any]:
        """An entry of `chat_logprobs`."""
        return {"token": self.name, "logprob": self.logprob, "bytes": [*self.text]}


class TokenScores:
    """Collects the tokens of one text from left to right until it is sent.

    begin: characters before them. markers: special tokens in the text. is_prompt: list others too, by their names."""

    def __init__(self, tokenizer: Any, begin: int, markers: Mapping[int, str], is_prompt: bool = False):
        self._tokenizer, self._markers, self._is_prompt = tokenizer, markers, is_prompt
        self._spelling, self._decoder = spelling_of(tokenizer), codecs.getincrementaldecoder("utf-8")("replace")
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
        missing = None if self._is_prompt and math.isnan(logprob) else IMPOSSIBLE  # a prompt's first token has none
        return TokenScore(token, text, logprob if math.isfinite(logprob) else missing, self._offset)

    def _text(self, token: int) -> bytes:
        """The bytes of a token after the last one; none of a special token that is not in the text."""
        if token in self._markers:
            return self._markers[token].encode()
        if (spelling := self._spelling) is None:  # how tokens join is not known
            return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()
        return spelling.texts[spelling.after.get(self._last, 0)].get(token, b"")


def score_prompt(model: Any, ids: list[int], count: int) -> StepLogProbs:
    """Log-probabilities [1, P] of a prompt's tokens under a causal model, NaN for the first one."""
    parts, size = [], max(1, MAX_LOGITS // model.facts.vocab_size)
    with torch.inference_mode(), weights_lock(model):
        for positions in torch.arange(len(ids)).split(size):
            logits = model(build_rows_query(model, [ids], [positions.tolist()], [len(ids)]))
            tokens = torch.tensor([ids])[:, positions].to(logits.device)
            parts.append(StepLogProbs.from_logits(logits, tokens, count))
    scores = StepLogProbs.combine(parts, lambda tensors: torch.cat(tensors, 1).cpu())
    return scores.fill(torch.arange(len(ids)).unsqueeze(0) == 0)


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""
    return {
        "content": [score.to_dict() | {"top_logprobs": [best.to_dict() for best in score.best]} for score in scores]
    }


def text_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; the keys of a token are distinct, and it is among them."""
    tops = list[dict[str, Any] | None]()
    for score in scores:
        top: dict[str, Any] = {}
        is_missing = score.token not in [best.token for best in score.best]
        for entry in [*score.best, score] if score.best and is_missing else score.best:
            top[f"token_id:{entry.token}" if entry.name in top else entry.name] = entry.logprob
        tops.append(None if score.logprob is None else top)
    columns = zip(*((score.name, score.logprob, score.offset) for score in scores))
    return {"top_logprobs": tops, **dict(zip(("tokens", "token_logprobs", "text_offset"), columns))}
