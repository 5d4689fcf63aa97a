"""Ids that are final become text in a queue of the event loop, cut off where a stop sequence begins."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from torch import Tensor, device
from transformers.cli.serving.utils import response_events_to_chunks

from paradec.core.logprobs import LogProbs
from paradec.integrations.server.scores import Scored, Scores

CPU = device("cpu")
BROKEN = (ValueError, RuntimeError, KeyError, TypeError)
"""What transformers' parser raises for a tool call that is none."""
OPENING = "<tool_call>"
MOST_DRAFTS = 4
"""Drafts that wait for a reader; a slow one is not given more."""


class Draft(str):
    """JSON text of the tokens to the right of the final text, for a comment of the stream."""


class Cut:
    """Text without a stop sequence and what follows it, from pieces that may end within one.

    >>> cut = Cut(["END"])
    >>> cut.feed("one E"), cut.feed("ND two"), cut.rest()
    ('one ', '', '')
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.over = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text so far is new and can no longer belong to a stop sequence."""
        if self.over:
            return ""
        text = self._held + text
        # the one that is complete first ends it, however the text comes in pieces
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.over, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, once nothing follows."""
        held, self._held = self._held, ""
        return held


def cut_off(text: str, stops: Sequence[str]) -> str:
    """A whole text up to the stop sequence that is complete first."""
    cut = Cut(stops)
    return cut.feed(text) + cut.rest()


class TextStream:
    """A streamer of `paradec.batching`, whose `put` is called by the stepping thread, and what transformers' handlers
    read: a queue of texts (`ReasoningText` and `ToolCall` among them), `total_tokens`, `cancel`.

    Args:
        tokenizer: with a fast backend. stops: texts at which the answer is cut off. parser: transformers' response
            parser, or None for plain text. mask: the mask id, for a `Draft` after each step that left something open;
            None for none.
        on_first: called with the first tokens. scored: whether texts come with log-probabilities (`Scored`).
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        parser: Any = None,
        mask: int | None = None,
        on_first: Callable[[], None] | None = None,
        scored: bool = False,
    ):
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.total_tokens = 0
        self.cancel: Callable[[], Any] = lambda: None
        """Set by whoever gave the prompt to the batch."""
        self._loop, self._owner = asyncio.get_running_loop(), threading.get_ident()
        self._tokenizer, self._parser = tokenizer, parser
        self._decoder = DecodeStream([], skip_special_tokens=parser is None)
        self._cut, self._on_first = Cut(stops), on_first
        self._text = ""  # decoded so far, without a cut
        self._read = ""  # what the parser was given
        self._begun = False
        self._length = 0  # characters that were let through
        self._scores: Scores | None = None
        if scored:
            self._scores, self._found = Scores(tokenizer, parser is not None), LogProbs.empty(1, 0, 0, CPU)
            self.put_logprobs = self._put_logprobs
        if mask is not None:
            self._mask = mask
            self.put_draft = self._put_draft
        if parser is not None:
            self._push(response_events_to_chunks(parser.initial_events))

    def put(self, ids: Tensor) -> None:
        """The prompt [1, P] at first, then ids [1, n] that are final with everything left of them."""
        if not self._begun:
            self._begun = True
            return
        if self.total_tokens == 0 and self._on_first is not None:
            self._on_first()
        row = ids[0].tolist()
        self.total_tokens += len(row)
        if self._scores is not None:
            self._scores.feed(row, self._found)
        pieces = (self._decoder.step(self._tokenizer._tokenizer, token) for token in row)
        self._write("".join(piece for piece in pieces if piece is not None))

    def end(self) -> None:
        """Nothing: `finish` comes with the output."""

    def finish(self, text: str | None, error: Any = None) -> None:
        """The answer has ended. text: all of it; error: what the queue gets in the place of its end, or None."""
        if error is None and self._parser is None and text is not None and text.startswith(self._text):
            self._write(text[len(self._text) :])  # what the decoder held back: an unfinished character
        rest = self._cut.rest()
        found: list[Any] = []
        if self._parser is None:
            found = [rest] if rest else []
        else:
            found += self._parsed(rest) if rest else []
            try:
                found += response_events_to_chunks(self._parser.finalize()[1]) if self._parser is not None else []
            except BROKEN:
                pass  # the answer ended within a tool call: what is whole has been sent
        self._length += len(rest)
        self._push([*self._with_scores(found, True), error])

    def _write(self, text: str) -> None:
        self._text += text
        text = self._cut.feed(text)
        self._length += len(text)
        if text:
            self._push(self._with_scores([text] if self._parser is None else self._parsed(text)))

    def _parsed(self, text: str) -> list[Any]:
        """What the parser makes of a piece. A call that cannot be read is text, as is all that follows it."""
        self._read += text
        try:
            return response_events_to_chunks(self._parser.feed(text))
        except BROKEN:
            self._parser = None
            at = self._read.rfind(OPENING)
            return [self._read[at:] if at >= 0 else text]

    def _put_logprobs(self, found: LogProbs) -> None:
        """Of the ids that come next."""
        self._found = found

    def _with_scores(self, items: list[Any], last: bool = False) -> list[Any]:
        """Items of which the first text has the tokens whose text was let through, if anybody wants to know."""
        at = next((at for at, item in enumerate(items) if type(item) is str), None)
        if self._scores is None or (at is None and not last):
            return items
        scores = self._scores.until(self._length)
        if at is None:
            return [*items, Scored("", scores)] if scores else items
        return [*items[:at], Scored(items[at], scores), *items[at + 1 :]]

    def _put_draft(self, ids: Tensor) -> None:
        if self.queue.qsize() >= MOST_DRAFTS or self._cut.over:
            return
        texts = [None if token == self._mask else self._tokenizer.decode([token]) for token in ids[0].tolist()]
        self._push([Draft(json.dumps({"draft": texts}, ensure_ascii=False))])

    def _push(self, items: Sequence[Any]) -> None:
        if threading.get_ident() == self._owner:
            for item in items:
                self.queue.put_nowait(item)
        elif items:
            self._loop.call_soon_threadsafe(self._put_all, items)

    def _put_all(self, items: Sequence[Any]) -> None:
        for item in items:
            self.queue.put_nowait(item)


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop sequence."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
