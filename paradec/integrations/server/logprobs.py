"""Log-probabilities of tokens, as the two endpoints of OpenAI write them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from openai.types.completion_choice import Logprobs

from paradec.constraints.spelling import spelling_of
from paradec.core.family_queries import build_rows_query
from paradec.core.logprobs import NAMES, LogProbs, StepLogProbs
from paradec.core.weights import weights_lock

IMPOSSIBLE = -9999.0  # OpenAI's number for a token without a probability
MAX_LOGITS = 2**27  # logits of a prompt that are held at once


class TokenScore(NamedTuple):
    """A token with its bytes.

    Fields: logprob: None for the first token of a prompt. offset: whole characters of the text before it. best: the
    likeliest tokens, in descending order.
    """

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

    Args:
        begin: characters of the text before them. markers: special tokens that are in the text.
        is_prompt: list special tokens too, by their names.
    """

    def __init__(
        self, tokenizer: Any, begin: int = 0, markers: Mapping[int, str] | None = None, is_prompt: bool = False
    ):
        self._tokenizer, self._spelling, self._is_prompt = tokenizer, spelling_of(tokenizer), is_prompt
        self._markers = markers or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = self.num_sent = begin  # characters of the text so far, and those that are sent
        self._last, self._waiting = list[int](), list[TokenScore]()

    def add(self, ids: Sequence[int], scores: LogProbs | StepLogProbs) -> None:
        """Add tokens [N] and their scores [1, N]."""
        chosen, best, tokens = (getattr(scores, name)[0].tolist() for name in NAMES)
        for index, token in enumerate(ids):
            pairs = [(other, value) for other, value in zip(tokens[index], best[index], strict=True) if other >= 0]
            likeliest = [TokenScore(other, self._text(other) or self._name(other), _finite(v)) for other, v in pairs]
            text, logprob = self._text(token), chosen[index]
            if text or self._is_prompt:
                value = None if self._is_prompt and math.isnan(logprob) else _finite(logprob)
                self._waiting.append(TokenScore(token, text or self._name(token), value, self._offset, likeliest))
                self._offset += len(self._decoder.decode(text))
                self._last = [token] if text else self._last

    def take(self, takes_all: bool = True) -> list[TokenScore]:
        """Remove and return the tokens: all of them, or those that begin in the text that is sent."""
        end = math.inf if takes_all else self.num_sent
        count = next((n for n, score in enumerate(self._waiting) if score.offset >= end), len(self._waiting))
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return ready

    def _text(self, token: int) -> bytes:
        """The bytes of a token after the last one; none of a special token that is not in the text."""
        if token in self._markers:
            return self._markers[token].encode()
        if (spelling := self._spelling) is not None:
            return spelling.texts[spelling.after.get(self._last[0], 0) if self._last else 0].get(token, b"")
        decode = self._tokenizer.decode
        before = decode(self._last, skip_special_tokens=True)
        return str(decode([*self._last, token], skip_special_tokens=True)).removeprefix(before).encode()

    def _name(self, token: int) -> bytes:
        return str(self._tokenizer.convert_ids_to_tokens(token)).encode()


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


def text_logprobs(scores: Sequence[TokenScore]) -> Logprobs:
    """`logprobs` of a choice of /v1/completions; the keys of a token are distinct, and it is among them."""
    tops: list[dict[str, Any] | None] = []
    for score in scores:
        is_new = score.best and score.token not in [best.token for best in score.best]
        top: dict[str, Any] = {}
        for best in (*score.best, score) if is_new else score.best:
            top[f"token_id:{best.token}" if best.name in top else best.name] = best.logprob
        tops.append(None if score.logprob is None else top)
    return Logprobs.model_construct(
        text_offset=[score.offset for score in scores],
        token_logprobs=[score.logprob for score in scores],
        tokens=[score.name for score in scores],
        top_logprobs=tops,
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else IMPOSSIBLE
