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
    offset: int = 0
    best: Sequence[TokenScore] = ()

    @property
    def name(self) -> str:
        """Its text, or its bytes where they are no whole characters."""
        try:
            return self.text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.text)


class TokenScores:
    """Collects the tokens of one text from left to right until their text is sent.

    begin: characters of the text before them. markers: special tokens that are in the text.
    is_prompt: list special tokens too, by their names."""

    def __init__(self, tokenizer: Any, begin: int, markers: Mapping[int, str], is_prompt: bool = False):
        self._tokenizer, self._markers, self._is_prompt = tokenizer, markers, is_prompt
        self._spelling, self._decoder = spelling_of(tokenizer), codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = self.num_sent = begin  # characters of the text so far, and those that are sent
        self._last, self._waiting = list[int](), list[TokenScore]()

    def add(self, ids: Sequence[int], scores: LogProbs | StepLogProbs) -> None:
        """Add tokens [N] and their scores [1, N]."""
        for token, logprob, *best in zip(ids, *(getattr(scores, name)[0].tolist() for name in NAMES)):
            if (text := self._text(token)) or self._is_prompt:
                likeliest = [self._score(other, value) for value, other in zip(*best) if other >= 0]
                score = self._score(token, logprob)._replace(offset=self._offset, best=likeliest)
                is_first = self._is_prompt and math.isnan(logprob)
                self._waiting.append(score._replace(logprob=None) if is_first else score)
                self._offset += len(self._decoder.decode(text))
                self._last = [token] if text else self._last

    def take(self, takes_all: bool = True) -> list[TokenScore]:
        """Remove and return the tokens: all of them, or those that begin in the text that is sent."""
        end = math.inf if takes_all else self.num_sent
        count = next((n for n, score in enumerate(self._waiting) if score.offset >= end), len(self._waiting))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready

    def _score(self, token: int, logprob: float) -> TokenScore:
        text = self._text(token) or str(self._tokenizer.convert_ids_to_tokens(token)).encode()
        return TokenScore(token, text, logprob if math.isfinite(logprob) else IMPOSSIBLE)

    def _text(self, token: int) -> bytes:
        """The bytes of a token after the last one; none of a special token that is not in the text."""
        if token in self._markers:
            return self._markers[token].encode()
        if (spelling := self._spelling) is not None:
            return spelling.texts[spelling.after.get(self._last[0], 0) if self._last else 0].get(token, b"")
        decode = self._tokenizer.decode
        before = decode(self._last, skip_special_tokens=True)
        return str(decode([*self._last, token], skip_special_tokens=True)).removeprefix(before).encode()


def score_prompt(model: Any, ids: list[int], count: int) -> StepLogProbs:
    """Log-probabilities [1, P] of a prompt's tokens under a causal model, NaN for the first one."""
    parts, size = [], max(1, MAX_LOGITS // model.facts.vocab_size)
    with torch.inference_mode(), weights_lock(model):
        for begin in range(0, len(ids), size):
            positions = [*range(begin, min(begin + size, len(ids)))]
            logits = model(build_rows_query(model, [ids], [positions], [len(ids)]))
            tokens = torch.tensor([ids[begin : begin + size]], device=logits.device)
            parts.append(StepLogProbs.from_logits(logits, tokens, count))
    scores = StepLogProbs.combine(parts, lambda tensors: torch.cat(tensors, 1).cpu())
    return scores.fill(torch.arange(len(ids)).unsqueeze(0) == 0)


def chat_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def entry(score: TokenScore) -> dict[str, Any]:
        return {"token": score.name, "logprob": score.logprob, "bytes": [*score.text]}

    return {"content": [{**entry(score), "top_logprobs": [*map(entry, score.best)]} for score in scores]}


def text_logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; the keys of a token are distinct, and it is among them."""
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for score in scores:
        top: dict[str, Any] = {}
        for best in score.best:
            top[f"token_id:{best.token}" if best.name in top else best.name] = best.logprob
        if score.best and score.token not in [best.token for best in score.best]:
            top[f"token_id:{score.token}" if score.name in top else score.name] = score.logprob
        entry = (score.name, score.logprob, None if score.logprob is None else top, score.offset)
        for values, value in zip(result.values(), entry, strict=True):
            values.append(value)
    return result
