"""The answers to one body: decoded by the engine, sent as one response or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi.responses import Response, StreamingResponse
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from tokenizers.decoders import DecodeStream
from torch import Tensor

from paradec.api.output import Output
from paradec.batching.slots import Ticket
from paradec.constraints.compiler import Compiler
from paradec.core.checks import check_int, shown
from paradec.core.logprobs import LogProbs
from paradec.core.prompts import Prompts
from paradec.integrations.server.chat import AnswerParser, Parts, StopCutter
from paradec.integrations.server.engine import Engine, EngineStopped, Metrics
from paradec.integrations.server.limits import ApiError, Call, to_api_error
from paradec.integrations.server.logprobs import TokenScore, TokenScores, chat_logprobs, text_logprobs
from paradec.integrations.server.request_body import ChatBody, TextBody, check_room, is_complete

MAX_CHOICES = 1024
"""Answers to one body."""
MAX_DRAFTS = 4
"""Waiting events beyond which no draft is added."""


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
        """Add final tokens of a stream."""
        self.num_tokens += len(ids)
        if self.scores is not None and scores is not None:
            self.scores.add(ids, scores)
        step = self.decoder.step
        return self._cut("".join(step(self.tokenizer._tokenizer, token) or "" for token in ids), False)

    def finish(self, output: Output) -> Piece:
        """Add the tokens that were not streamed, and characters that the decoder holds back."""
        ids = output.sequences[0, output.filled[0]][: output.tokens[0]].tolist()
        if self.scores is not None and output.logprobs is not None:
            new = slice(self.num_tokens, len(ids))
            self.scores.add(ids[new], output.logprobs.placed(lambda tensor, _: tensor[:, output.filled[0]][:, new]))
        self.num_tokens, self.num_reused, whole = len(ids), sum(output.reused), str(output.text)
        piece = self._cut(whole.removeprefix(self.text) if whole.startswith(self.text) else "", True)
        is_whole = output.finished[0] or self.cutter.is_over or self.is_complete(ids)
        piece.finish_reason = ("tool_calls" if self.num_calls else "stop") if is_whole else "length"
        return piece

    def _cut(self, text: str, is_last: bool) -> Piece:
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


@dataclass
class Served:
    """One model under one name."""

    engine: Engine
    metrics: Metrics
    name: str
    presets: Mapping[str, Mapping[str, Any]]
    """Fields of a request by name."""
    max_answer: int
    """Tokens that a client may ask for."""

    def __post_init__(self) -> None:
        self.compiler = Compiler(self.model.tokenizer, self.model.facts.vocab_size)

    @property
    def model(self) -> Any:
        """The model."""
        return self.engine.model

    def check_name(self, name: Any) -> None:
        """Raise ApiError for the name of another model."""
        if name not in (None, self.name):
            raise ApiError(f"model={shown(name)} is not served here; {self.name!r} is", 404, "model")


class Reply:
    """The answers to the prompts of a body: `n` to each.

    Args:
        changes: fields of `paradec.Request`. rows: the ids of the prompts. make_parser: builds an answer's parser.
        echoes: for each prompt the piece that its answers begin with; none without `echo`.

    Raises:
        ApiError: too many answers, or a prompt or a field that cannot be used.
    """

    def __init__(
        self,
        served: Served,
        call: Call,
        body: ChatBody | TextBody,
        changes: dict[str, Any],
        rows: list[list[int]],
        make_parser: Callable[[], AnswerParser],
        echoes: list[tuple[Parts, Any]],
    ):
        self.served, self.call, self.body, self.changes = served, call, body, changes
        self.rows, self.n, self.is_chat = rows, body.n or 1, isinstance(body, ChatBody)
        if len(rows) * self.n > MAX_CHOICES:
            raise ApiError(f"{len(rows)} prompts with n={self.n} ask for more than {MAX_CHOICES} answers", 400, "n")
        self._queue: asyncio.Queue[tuple[Answer, Any]] = asyncio.Queue()
        self._loop, model, stops = asyncio.get_running_loop(), served.model, changes.get("stop_strings") or ()
        self.answers, self.begins = list[Answer](), list[Piece]()
        for index in range(len(rows) * self.n):
            parts, scored = echoes[index // self.n] if echoes else (Parts(), [])
            has_scores = body.num_logprobs is not None
            scores = TokenScores(model.tokenizer, len(parts.content)) if has_scores else None
            cutter = StopCutter((stops,) if isinstance(stops, str) else stops)
            complete = partial(is_complete, changes["constraint"], model)
            row = rows[index // self.n]
            self.answers.append(Answer(index, row, model.tokenizer, cutter, make_parser(), scores, complete))
            self.begins += [Piece(self.answers[-1], parts, scored)] if echoes else []
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }
        for answer in self.answers:
            try:
                self._submit(answer)
            except (ValueError, TypeError, EngineStopped) as error:
                raise to_api_error(error) from error

    def _submit(self, answer: Answer) -> None:
        """Give the prompt of an answer to the engine."""
        model, facts, size, changes = self.served.model, self.served.model.facts, len(answer.prompt), self.changes
        new = changes.get("max_new_tokens", self.served.engine.batch.request.max_new_tokens)
        if new is None:  # as many as there is room for
            room = min(model.default_max_new_tokens, self.served.max_answer)
            new = max(1, room if facts.max_length is None else min(room, facts.max_length - size))
        check_int("max_tokens", new, low=0 if self.begins else 1, high=self.served.max_answer)
        facts.check_length(size + new, new)
        if new == 0:  # an echo alone
            self._send(answer, None)
            return
        if changes["constraint"] is not None:
            check_room(changes["constraint"], model, new)
        own: dict[str, Any] = {"max_new_tokens": new, "cache_salt": self.body.cache_salt}
        if (number := answer.index % self.n) and isinstance(seed := changes.get("seed"), int):
            own["seed"] = (seed + number) % 2**63

        def send_draft(ids: list[int]) -> None:
            if self._queue.qsize() < MAX_DRAFTS and not answer.cutter.is_over:
                texts = [None if token == facts.mask_token_id else model.tokenizer.decode([token]) for token in ids]
                self._send(answer, json.dumps({"draft": texts}, ensure_ascii=False))

        def on_done(ticket: Ticket) -> None:
            self.served.metrics.record_answer(ticket)
            self._send(answer, ticket.output)

        streamer = None
        if self.body.stream:
            drafts = send_draft if self.body.paradec.get("drafts") else None
            streamer = Streamer(partial(self._send, answer), drafts)
        self.call.reserve(size + new)
        self.call.submit(Prompts([answer.prompt], True, [0]), on_done=on_done, streamer=streamer, **{**changes, **own})

    def _send(self, answer: Answer, event: Any) -> None:
        """Send ids with scores, a draft or an output to the event loop; None ends an answer without tokens."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (answer, event))

    async def _pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, until all answers have ended. Raises ApiError if one fails."""
        num_open = len(self.answers)
        while num_open:
            events = [await self._queue.get()]
            while not self._queue.empty():
                events.append(self._queue.get_nowait())
            pieces = []
            for answer, event in events:
                num_open -= event is None or isinstance(event, Output)
                if isinstance(event, Output) and event.error is not None:
                    raise to_api_error(event.error) from event.error
                if event is None:
                    pieces.append(Piece(answer, finish_reason="length"))
                elif isinstance(event, str):
                    pieces.append(Piece(answer, draft=event))
                else:
                    pieces.append(answer.finish(event) if isinstance(event, Output) else answer.feed(*event))
            yield pieces

    async def respond(self) -> Response:
        """The response, or its stream. Raises ApiError if an answer fails."""
        if self.body.stream:
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        parts = [self.begins[answer.index : answer.index + 1] for answer in self.answers]
        async for pieces in self._pieces():
            for piece in pieces:
                parts[piece.answer.index].append(piece)
        fields: Any = {**self.head, "choices": [self._choice(*part) for part in parts], "usage": self._usage()}
        if self.is_chat:
            return Response(to_json(ChatCompletion(object="chat.completion", **fields)), media_type="application/json")
        return Response(to_json(Completion(object="text_completion", **fields)), media_type="application/json")

    async def _stream(self) -> AsyncIterator[str]:
        began, started = time.perf_counter(), set[int]()
        try:
            role: Any = {"role": "assistant", "content": ""}
            for answer in self.answers if self.is_chat else []:
                yield self._event([ChunkChoice(index=answer.index, delta=role, finish_reason=None)])
            yield "".join(map(self._events, self.begins))
            async for pieces in self._pieces():
                for piece in pieces:
                    if piece.answer.num_tokens and piece.answer.index not in started:
                        started.add(piece.answer.index)
                        self.served.metrics.first.observe(time.perf_counter() - began)
                yield "".join(map(self._events, pieces))
            if self.body.stream_options.include_usage:
                yield self._event([], usage=self._usage())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"

    def _events(self, piece: Piece) -> str:
        """The events of a piece; a draft is a comment, since clients read all data as chunks."""
        if piece.draft:
            return f": {piece.draft}\n\n"
        is_empty = not any(piece.parts) and not piece.scores and piece.finish_reason is None
        return "" if is_empty else self._event([self._choice(piece, is_chunk=True)])

    def _event(self, choices: list[Any], **more: Any) -> str:
        fields: Any = {**self.head, "choices": choices, **more}
        if self.is_chat:
            return f"data: {to_json(ChatCompletionChunk(object='chat.completion.chunk', **fields))}\n\n"
        return f"data: {to_json(Completion(object='text_completion', **fields))}\n\n"

    def _choice(self, *pieces: Piece, is_chunk: bool = False) -> Any:
        """A choice, or a part of it in a stream."""
        scores = [score for piece in pieces for score in piece.scores]
        content = "".join(piece.parts.content for piece in pieces)
        fields: Any = {"index": pieces[0].answer.index, "finish_reason": pieces[-1].finish_reason}
        if not self.is_chat:
            logprobs = text_logprobs(scores) if scores else None
            return CompletionChoice.model_construct(text=content, logprobs=logprobs, **fields)
        calls = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call._asdict()}
            | ({"index": piece.first_call + number} if is_chunk else {})
            for piece in pieces
            for number, call in enumerate(piece.parts.calls)
        ]
        message: Any = {} if is_chunk else {"role": "assistant", "content": None if calls else ""}
        texts = {"content": content, "reasoning_content": "".join(piece.parts.reasoning for piece in pieces)}
        message |= {name: value for name, value in {**texts, "tool_calls": calls}.items() if value}
        if scores or (not is_chunk and pieces[0].answer.scores is not None):
            fields["logprobs"] = chat_logprobs(scores)
        return ChunkChoice(delta=message, **fields) if is_chunk else ChatChoice(message=message, **fields)

    def _usage(self) -> CompletionUsage:
        """The tokens of all answers; a prompt counts once."""
        prompt, completion = sum(map(len, self.rows)), sum(answer.num_tokens for answer in self.answers)
        reused = [answer.num_reused for answer in self.answers]
        cached = sum(min(reused[begin : begin + self.n]) for begin in range(0, len(reused), self.n))
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details={"cached_tokens": cached},  # type: ignore[arg-type]
        )


def to_json(response: Any) -> str:
    """Write the fields of a response that were set."""
    return str(response.model_dump_json(exclude_unset=True, warnings=False))
