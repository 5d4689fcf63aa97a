"""The two endpoints: a body is checked and encoded, decoded by the engine, and answered as a whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import Response, StreamingResponse
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.completion_usage import PromptTokensDetails
from tokenizers.decoders import DecodeStream
from torch import Tensor

from paradec.api.output import Output
from paradec.batching.slots import Ticket
from paradec.constraints.compiler import Compiler
from paradec.constraints.spelling import spelling_of
from paradec.core.checks import check_int, shown
from paradec.core.logprobs import LogProbs
from paradec.core.prompt_ids import is_rows_of_ids
from paradec.core.prompts import Prompts, encode
from paradec.integrations.server import chat, request_body
from paradec.integrations.server.chat import AnswerParser, Piece, StopCutter
from paradec.integrations.server.engine import Engine, EngineStopped, Metrics
from paradec.integrations.server.limits import ApiError, Call, to_api_error
from paradec.integrations.server.logprobs import TokenScores, chat_logprobs, score_prompt, text_logprobs
from paradec.integrations.server.request_body import OWN, ChatBody, TextBody

OBJECTS = {
    Completion: "text_completion",
    ChatCompletion: "chat.completion",
    ChatCompletionChunk: "chat.completion.chunk",
}
MAX_CHOICES = 1024  # answers to one body
MAX_DRAFTS = 4  # waiting events beyond which no draft is added


@dataclass
class Service:
    """One model under one name.

    Args:
        presets: fields of a request by name. max_answer: tokens that a client may ask for.
    """

    engine: Engine
    metrics: Metrics
    name: str
    presets: Mapping[str, Mapping[str, Any]]
    max_answer: int

    def __post_init__(self) -> None:
        self.model = self.engine.model
        self.compiler = Compiler(self.model.tokenizer, self.model.facts.vocab_size)
        added = self.model.tokenizer.added_tokens_decoder.items()
        self.hidden = {token for token, entry in added if entry.special} | {self.model.facts.mask_token_id}

    def check_name(self, name: Any) -> None:
        """Raise ApiError for the name of another model."""
        if name not in (None, self.name):
            raise ApiError(f"model={shown(name)} is not served here; {self.name!r} is", 404, "model")

    async def chat(self, call: Call, body: ChatBody) -> Response:
        """Answer a body of /v1/chat/completions. Raises ApiError."""
        self.check_name(body.model)
        changes, tokenizer = request_body.read_changes(body, self.presets), self.model.tokenizer
        if "chat" in body.paradec:
            raise ApiError("chat is for /v1/completions; messages are a chat", 422, OWN)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", 422, "top_logprobs")
        tools, required = chat.choose_tools(body)
        template = chat.response_template_of(tokenizer)
        if required and template is not chat.HERMES:
            reason = "is not offered for this model, whose chat template writes no <tool_call> with JSON"
            raise ApiError(f"tool_choice={shown(body.tool_choice)} {reason}", 422, "tool_choice")
        ids, text = await asyncio.to_thread(chat.encode_chat, self.model, body, tools)
        await self._prepare(body, changes, [ids], required)
        end = None if changes["constraint"] else chat.reasoning_end(tokenizer, text)
        parser = partial(AnswerParser, end, template if tools else None, tools)
        markers = chat.marker_tokens(tokenizer, template if tools else None, end)
        return await Reply(self, call, body, changes, [ids], parser, markers).respond()

    async def complete(self, call: Call, body: TextBody) -> Response:
        """Answer a body of /v1/completions. Raises ApiError."""
        self.check_name(body.model)
        changes = request_body.read_changes(body, self.presets)
        rows = await asyncio.to_thread(self._encode_prompts, body)
        await self._prepare(body, changes, rows, None)
        echoes = await asyncio.to_thread(self._echo, body, rows) if body.echo else []
        parser = partial(AnswerParser, None, None, None)
        return await Reply(self, call, body, changes, rows, parser, {}, echoes).respond()

    async def _prepare(
        self, body: ChatBody | TextBody, changes: dict[str, Any], rows: list[list[int]], required: Any
    ) -> None:
        """Set the constraint, whose automaton is made, and the number of log-probabilities. Raises ApiError."""
        changes["constraint"] = None
        if (form := request_body.find_format(body, required)) is not None:
            if changes.get("stop_strings"):
                raise ApiError("stop may end an answer before it has its form; leave it out", 400, "stop")
            read = request_body.read_constraint
            changes["constraint"] = await asyncio.to_thread(read, *form, self.model, self.compiler)
        if body.num_logprobs is not None:
            changes["logprobs"] = min(body.num_logprobs, self.model.facts.vocab_size)
            await asyncio.to_thread(spelling_of, self.model.tokenizer)  # it reads the whole vocabulary once
        if any(self.model.facts.hole_id in row for row in rows):
            raise ApiError("the prompt holds the mask token, and a server fills no masks")

    def _encode_prompts(self, body: TextBody) -> list[list[int]]:
        """The ids of each prompt. Raises ApiError."""
        rows, is_chat = [], body.paradec.get("chat", False)
        for prompt in body.prompt:
            if not (prompt.strip() if isinstance(prompt, str) else is_rows_of_ids([prompt])):
                reason = "must be a text with a word in it, a list of ids, or a list of these"
                raise ApiError(f"prompt={shown(prompt)} {reason}", 422, "prompt")
            try:
                rows += encode(self.model, prompt, chat=is_chat if isinstance(prompt, str) else None).rows
            except (ValueError, TypeError) as error:
                raise to_api_error(error, "prompt") from error
        return rows

    def _echo(self, body: TextBody, rows: list[list[int]]) -> list[Piece]:
        """The texts of prompts, with the scores of their tokens. Raises ApiError."""
        model, count, echoes = self.model, body.num_logprobs, []
        if body.paradec.get("chat"):
            raise ApiError("echo is for prompts that are no chat", 400, "echo")
        if count is not None and model.facts.topology != "causal":
            reason = "needs a causal model: others give the tokens of a prompt no log-probabilities"
            raise ApiError(f"echo=true with logprobs {reason}", 400, "echo")
        for prompt, ids in zip(body.prompt, rows, strict=True):
            scores = TokenScores(model.tokenizer, is_prompt=True)
            if count is not None:
                scores.add(ids, score_prompt(model, ids, min(count, model.facts.vocab_size)))
            text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)
            echoes.append(Piece(text, scores=scores.take()))
        return echoes


class Answer:
    """One choice of a response."""

    def __init__(self, reply: Reply, index: int):
        self.index, self.prompt, self._reply = index, reply.rows[index // reply.n], reply
        self.num_tokens = self.num_calls = self.num_reused = 0  # reused: tokens of the prompt that were not evaluated
        stops = reply.changes.get("stop_strings") or ()
        self.cutter, self._parser = StopCutter((stops,) if isinstance(stops, str) else stops), reply.make_parser()
        self._tokenizer, self._text = reply.service.model.tokenizer, ""
        self._decoder = DecodeStream([], skip_special_tokens=False)
        begin = len(reply.echoes[index // reply.n].content) if reply.echoes else 0
        has_scores = reply.body.num_logprobs is not None
        self.scores = TokenScores(self._tokenizer, begin, reply.markers) if has_scores else None

    def feed(self, ids: list[int], scores: LogProbs | None) -> Piece:
        """Add final tokens of a stream."""
        self.num_tokens += len(ids)
        if self.scores is not None and scores is not None:
            self.scores.add(ids, scores)
        step = self._decoder.step
        return self._cut("".join(step(self._tokenizer._tokenizer, token) or "" for token in self._in_text(ids)), False)

    def finish(self, output: Output) -> Piece:
        """Add the tokens that were not streamed, and characters that the decoder holds back."""
        ids = output.sequences[0, output.filled[0]][: output.tokens[0]].tolist()
        if self.scores is not None and output.logprobs is not None:
            new = slice(self.num_tokens, len(ids))
            self.scores.add(
                ids[new], output.logprobs.map_columns(lambda tensor, _: tensor[:, output.filled[0]][:, new])
            )
        self.num_tokens, self.num_reused = len(ids), sum(output.reused)
        text = self._tokenizer.decode(self._in_text(ids))
        piece = self._cut(text.removeprefix(self._text) if text.startswith(self._text) else "", True)
        is_whole = output.finished[0] or self.cutter.is_over or self._reply.is_complete(ids)
        return piece._replace(finish_reason=("tool_calls" if self.num_calls else "stop") if is_whole else "length")

    def _in_text(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token not in self._reply.dropped]

    def _cut(self, text: str, is_last: bool) -> Piece:
        self._text += text
        text = self.cutter.feed(text, is_last)
        piece = self._parser.feed(text, is_last)
        self.num_calls += len(piece.calls)
        if self.scores is not None:
            self.scores.num_sent += len(text)
            if is_last or any(piece):
                piece = piece._replace(scores=self.scores.take(takes_all=is_last and not self.cutter.is_over))
        return piece


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
class Reply:
    """The `n` answers to each prompt of a body.

    Args:
        changes: fields of `paradec.Request`. rows: the ids of the prompts. markers: special tokens that stay in texts.
        echoes: for each prompt the piece that its answers begin with.

    Raises:
        ApiError: too many answers.
    """

    service: Service
    call: Call
    body: ChatBody | TextBody
    changes: dict[str, Any]
    rows: list[list[int]]
    make_parser: Callable[[], AnswerParser]
    markers: dict[int, str]
    echoes: Sequence[Piece] = ()

    def __post_init__(self) -> None:
        self.n, self.is_chat = self.body.n or 1, isinstance(self.body, ChatBody)
        if len(self.rows) * self.n > MAX_CHOICES:
            reason = f"{len(self.rows)} prompts with n={self.n} ask for more than {MAX_CHOICES} answers"
            raise ApiError(reason, 400, "n")
        model = self.service.model
        self.dropped = self.service.hidden - {*self.markers}
        self.is_complete = partial(request_body.is_complete, self.changes["constraint"], model)
        self.answers = [Answer(self, index) for index in range(len(self.rows) * self.n)]
        self._queue: asyncio.Queue[tuple[Answer, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        name = "chatcmpl" if self.is_chat else "cmpl"
        self.head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.service.name}

    async def respond(self) -> Response:
        """The response, or its stream.

        Raises:
            ApiError: a prompt or a field that cannot be used, or an answer that fails.
        """
        try:
            for answer in self.answers:
                self._submit(answer)
        except (ValueError, TypeError, EngineStopped) as error:
            raise to_api_error(error) from error
        if self.body.stream:
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for answer, piece in self._pieces():
            pieces[answer.index].append(piece)
        choices = [self._choice(*pair) for pair in zip(self.answers, pieces)]
        return Response(self._to_json(choices, usage=self._usage()), media_type="application/json")

    def _submit(self, answer: Answer) -> None:
        """Give the prompt of an answer to the engine, and its echo to the client."""
        service, model, facts, size = self.service, self.service.model, self.service.model.facts, len(answer.prompt)
        if self.echoes:
            self._queue.put_nowait((answer, self.echoes[answer.index // self.n]))
        new = self.changes.get("max_new_tokens", service.engine.batch.request.max_new_tokens)
        if new is None:  # as many as there is room for
            room = min(model.default_max_new_tokens, service.max_answer)
            new = max(1, room if facts.max_length is None else min(room, facts.max_length - size))
        check_int("max_tokens", new, low=0 if self.echoes else 1, high=service.max_answer)
        facts.check_length(size + new, new)
        if new == 0:  # an echo alone
            self._queue.put_nowait((answer, Piece(finish_reason="length")))
            return
        if self.changes["constraint"] is not None:
            request_body.check_room(self.changes["constraint"], model, new)
        changes = {**self.changes, "max_new_tokens": new, "cache_salt": self.body.cache_salt}
        if (number := answer.index % self.n) and isinstance(seed := changes.get("seed"), int):
            changes["seed"] = (seed + number) % 2**63

        def send(event: Any) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (answer, event))

        def send_draft(ids: list[int]) -> None:
            if self._queue.qsize() < MAX_DRAFTS and not answer.cutter.is_over:
                texts = [None if token == facts.mask_token_id else model.tokenizer.decode([token]) for token in ids]
                send(Piece(draft=json.dumps({"draft": texts}, ensure_ascii=False)))

        def on_done(ticket: Ticket) -> None:
            service.metrics.record_answer(ticket)
            send(ticket.output)

        drafts = send_draft if self.body.paradec.get("drafts") else None
        streamer = Streamer(send, drafts) if self.body.stream else None
        self.call.reserve(size + new)
        self.call.submit(Prompts([answer.prompt], True, [0]), on_done=on_done, streamer=streamer, **changes)

    async def _pieces(self) -> AsyncIterator[tuple[Answer, Piece]]:
        """Pieces as they come, until all answers have ended. Raises ApiError if one fails."""
        num_open = len(self.answers)
        while num_open:
            answer, event = await self._queue.get()
            if isinstance(event, Output) and event.error is not None:
                raise to_api_error(event.error) from event.error
            if not isinstance(event, Piece):
                event = answer.finish(event) if isinstance(event, Output) else answer.feed(*event)
            num_open -= event.finish_reason is not None
            yield answer, event

    async def _stream(self) -> AsyncIterator[str]:
        """Server-sent events; those that are ready together are sent together."""
        began, started, events = time.perf_counter(), set[int](), ""
        try:
            role: Any = {"role": "assistant", "content": ""}
            for answer in self.answers if self.is_chat else []:
                choice = ChunkChoice(index=answer.index, delta=role, finish_reason=None)
                yield f"data: {self._to_json([choice])}\n\n"
            async for answer, piece in self._pieces():
                if answer.num_tokens and answer.index not in started:
                    started.add(answer.index)
                    self.service.metrics.first.observe(time.perf_counter() - began)
                if piece.draft:  # a comment, since clients read all data as chunks
                    events += f": {piece.draft}\n\n"
                elif any(piece):
                    events += f"data: {self._to_json([self._choice(answer, [piece])])}\n\n"
                if events and self._queue.empty():
                    yield events
                    events = ""
            if self.body.stream_options.include_usage:
                events += f"data: {self._to_json([], usage=self._usage())}\n\n"
            yield f"{events}data: [DONE]\n\n"
        except ApiError as error:
            yield f"{events}data: {json.dumps(error.body)}\n\n"

    def _to_json(self, choices: list[Any], **more: Any) -> str:
        """Write a response, or a chunk of a stream."""
        kind: Any = Completion
        if self.is_chat:
            kind = ChatCompletionChunk if self.body.stream else ChatCompletion
        fields: Any = {"object": OBJECTS[kind], **self.head, "choices": choices, **more}
        return str(kind(**fields).model_dump_json(exclude_unset=True, warnings=False))

    def _choice(self, answer: Answer, pieces: Sequence[Piece]) -> Any:
        """A choice, or a part of it in a stream."""
        scores = [score for piece in pieces for score in piece.scores]
        content = "".join(piece.content for piece in pieces)
        fields: Any = {"index": answer.index, "finish_reason": pieces[-1].finish_reason}
        if not self.is_chat:
            logprobs = text_logprobs(scores) if scores else None
            return CompletionChoice.model_construct(text=content, logprobs=logprobs, **fields)
        calls: list[dict[str, Any]] = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call.model_dump()}
            for piece in pieces
            for call in piece.calls
        ]
        if self.body.stream:  # the calls of this piece are the last ones so far
            first = answer.num_calls - len(calls)
            calls = [{"index": index, **call} for index, call in enumerate(calls, first)]
        message: Any = {} if self.body.stream else {"role": "assistant", "content": None if calls else ""}
        texts = {"content": content, "reasoning_content": "".join(piece.reasoning for piece in pieces)}
        message |= {name: value for name, value in {**texts, "tool_calls": calls}.items() if value}
        if scores or (not self.body.stream and answer.scores is not None):
            fields["logprobs"] = chat_logprobs(scores)
        return ChunkChoice(delta=message, **fields) if self.body.stream else ChatChoice(message=message, **fields)

    def _usage(self) -> CompletionUsage:
        """The tokens of all answers; a prompt counts once."""
        prompt, completion = sum(map(len, self.rows)), sum(answer.num_tokens for answer in self.answers)
        reused = [answer.num_reused for answer in self.answers]
        cached = sum(min(reused[begin : begin + self.n]) for begin in range(0, len(reused), self.n))
        counts: Any = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return CompletionUsage(**counts, prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))
