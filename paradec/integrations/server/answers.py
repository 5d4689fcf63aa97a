"""Answers as text: tokens come from the engine's thread, pieces of text leave on the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import CompletionUsage
from tokenizers.decoders import DecodeStream
from torch import Tensor

from paradec.api.output import Output
from paradec.core.logprobs import LogProbs
from paradec.integrations.server.chat import AnswerParser, Parts, overlap
from paradec.integrations.server.errors import to_api_error
from paradec.integrations.server.logprobs import TokenScore, TokenScores

MAX_DRAFTS = 4
"""Waiting events beyond which no draft is added."""


class StopCutter:
    """Cuts a text, which comes in pieces, where the stop sequence begins that is complete first.

    >>> cutter = StopCutter(["END"])
    >>> cutter.feed("one E"), cutter.feed("ND two"), cutter.feed("", is_last=True)
    ('one ', '', '')
    """

    def __init__(self, stops: Sequence[str]):
        self.stops, self.is_over, self._held = tuple(stops), False, ""

    def feed(self, text: str, is_last: bool = False) -> str:
        """Take the next piece; return the new text that cannot belong to a stop sequence."""
        if self.is_over:
            return ""
        text = self._held + text
        ends = [(begin + len(stop), begin) for stop in self.stops if (begin := text.find(stop)) >= 0]
        if ends:
            self.is_over, self._held = True, ""
            return text[: min(ends)[1]]
        size = len(text) - (0 if is_last else max((overlap(text, stop) for stop in self.stops), default=0))
        self._held = text[size:]
        return text[:size]


@dataclass
class Piece:
    """A part of an answer."""

    answer: Answer
    parts: Parts = Parts()
    scores: Sequence[TokenScore] = ()
    first_call: int = 0
    """Calls of the answer before it."""
    finish_reason: Any = None
    """Of the last piece."""
    draft: str = ""
    """JSON of the tokens to the right of the text."""

    @property
    def is_sent(self) -> bool:
        """Whether a stream has an event for it."""
        return any(self.parts) or bool(self.scores or self.finish_reason or self.draft)


@dataclass
class Answer:
    """One choice of a response."""

    index: int
    prompt: list[int]
    tokenizer: Any
    cutter: StopCutter
    parser: AnswerParser
    scores: TokenScores | None
    is_complete: Callable[[list[int]], bool]
    """Whether ids are a complete answer although no token ended it."""
    decoder: DecodeStream = field(default_factory=lambda: DecodeStream([], skip_special_tokens=True))
    text: str = ""
    """Decoded so far."""
    num_tokens: int = 0
    num_calls: int = 0
    num_reused: int = 0
    """Tokens of the prompt that were not evaluated."""

    def feed(self, ids: list[int], scores: LogProbs | None) -> Piece:
        """Add final tokens."""
        self.num_tokens += len(ids)
        if self.scores is not None and scores is not None:
            self.scores.add(ids, scores)
        step = self.decoder.step
        return self._piece("".join(step(self.tokenizer._tokenizer, token) or "" for token in ids), False)

    def finish(self, output: Output) -> Piece:
        """Add the tokens that were not streamed, and characters that the decoder holds back."""
        ids = output.sequences[0, output.filled[0]][: output.tokens[0]].tolist()
        if self.scores is not None and output.logprobs is not None:
            new = slice(self.num_tokens, len(ids))
            self.scores.add(ids[new], output.logprobs.placed(lambda tensor, _: tensor[:, output.filled[0]][:, new]))
        self.num_tokens, self.num_reused, whole = len(ids), sum(output.reused), str(output.text)
        piece = self._piece(whole.removeprefix(self.text) if whole.startswith(self.text) else "", True)
        is_whole = output.finished[0] or self.cutter.is_over or self.is_complete(ids)
        piece.finish_reason = ("tool_calls" if self.num_calls else "stop") if is_whole else "length"
        return piece

    def _piece(self, text: str, is_last: bool) -> Piece:
        self.text += text
        text = self.cutter.feed(text, is_last)
        parts, scores = self.parser.feed(text, is_last), list[TokenScore]()
        if self.scores is not None:
            self.scores.num_sent += len(text)
            if is_last or any(parts):
                scores = self.scores.take(takes_all=is_last and not self.cutter.is_over)
        first_call, self.num_calls = self.num_calls, self.num_calls + len(parts.calls)
        return Piece(self, parts, scores, first_call)


class Streamer:
    """A streamer of `paradec.batching`, for the engine's thread.

    Args:
        send: takes ids [n] and their scores. send_draft: takes ids [n] right of the final ones; None for no drafts.
    """

    def __init__(self, send: Callable[[Any], None], send_draft: Callable[[list[int]], None] | None):
        self._send, self._has_begun = send, False
        self._scores: LogProbs | None = None
        if send_draft is not None:
            self.put_draft = lambda ids: send_draft(ids[0].tolist())

    def put(self, ids: Tensor) -> None:
        """Take the prompt [1, P], then ids [1, n] that are final with everything left of them."""
        if self._has_begun:
            self._send((ids[0].tolist(), self._scores))
        self._has_begun = True

    def put_logprobs(self, scores: LogProbs) -> None:
        """Take the log-probabilities of the ids that `put` takes next."""
        self._scores = scores

    def end(self) -> None:
        """Do nothing: the output follows."""


class AnswerQueue:
    """What the engine's thread sends to the event loop for the answers of one body."""

    def __init__(self, answers: Sequence[Answer], mask: int | None):
        self.answers, self._mask = answers, mask
        self._queue: asyncio.Queue[tuple[Answer, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def send(self, answer: Answer, event: Any) -> None:
        """Send ids with scores, a draft or an output, from any thread; None ends an answer without tokens."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (answer, event))

    def streamer(self, answer: Answer, has_drafts: bool) -> Streamer:
        """Build the streamer of an answer."""

        def send_draft(ids: list[int]) -> None:
            if self._queue.qsize() < MAX_DRAFTS and not answer.cutter.is_over:
                texts = [None if token == self._mask else answer.tokenizer.decode([token]) for token in ids]
                self.send(answer, json.dumps({"draft": texts}, ensure_ascii=False))

        return Streamer(lambda event: self.send(answer, event), send_draft if has_drafts else None)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, with those that came meanwhile, until all answers have ended.

        Raises:
            ApiError: an answer failed.
        """
        num_open = len(self.answers)
        while num_open:
            events = [await self._queue.get()]
            while not self._queue.empty():
                events.append(self._queue.get_nowait())
            pieces = []
            for answer, event in events:
                num_open -= event is None or isinstance(event, Output)
                if event is None:
                    pieces.append(Piece(answer, finish_reason="length"))
                elif isinstance(event, str):
                    pieces.append(Piece(answer, draft=event))
                elif not isinstance(event, Output):
                    pieces.append(answer.feed(*event))
                elif event.error is not None:
                    raise to_api_error(event.error) from event.error
                else:
                    pieces.append(answer.finish(event))
            yield pieces

    def usage(self) -> CompletionUsage:
        """The tokens of all answers; each prompt counts once."""
        prompts = {id(answer.prompt): len(answer.prompt) for answer in self.answers}
        reused: dict[int, int] = {}
        for answer in self.answers:
            key = id(answer.prompt)
            reused[key] = min(reused.get(key, answer.num_reused), answer.num_reused)
        prompt, completion = sum(prompts.values()), sum(answer.num_tokens for answer in self.answers)
        details: Any = {"cached_tokens": sum(reused.values())}
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=details,
        )
