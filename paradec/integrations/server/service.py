"""Both endpoints: a body becomes answers of the engine, and these a response or server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from fastapi.responses import Response, StreamingResponse
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice

from paradec.batching.slots import Ticket
from paradec.constraints.spelling import spelling_of
from paradec.constraints.values import Constraint
from paradec.core.checks import check_int, shown
from paradec.core.prompts import Prompts, encode, is_rows_of_ids
from paradec.integrations.server.answers import Answer, AnswerQueue, Piece, StopCutter
from paradec.integrations.server.chat import (
    HERMES,
    AnswerParser,
    Parts,
    choose_tools,
    encode_chat,
    reasoning_end,
    response_template_of,
)
from paradec.integrations.server.engine import Engine, EngineStopped
from paradec.integrations.server.errors import ApiError, to_api_error
from paradec.integrations.server.limits import Call
from paradec.integrations.server.logprobs import TokenScores, chat_logprobs, score_prompt, text_logprobs
from paradec.integrations.server.metrics import Metrics
from paradec.integrations.server.request_body import OWN, Body, ChatBody, TextBody, read_changes
from paradec.integrations.server.response_format import check_room, find_format, is_complete, read_constraint

MAX_CHOICES = 1024
"""Answers to one body."""
JSON = "application/json"


class ChatForm:
    """The JSON of /v1/chat/completions."""

    prefix = "chatcmpl"

    def response(self, is_chunk: bool, **fields: Any) -> ChatCompletion | ChatCompletionChunk:
        """A response, or an event of a stream."""
        if is_chunk:
            return ChatCompletionChunk(object="chat.completion.chunk", **fields)
        return ChatCompletion(object="chat.completion", **fields)

    def choice(self, is_chunk: bool, pieces: list[Piece]) -> ChatChoice | ChunkChoice:
        """A choice, or a part of it."""
        content = "".join(piece.parts.content for piece in pieces)
        reasoning = "".join(piece.parts.reasoning for piece in pieces)
        calls = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call._asdict()}
            | ({"index": piece.first_call + number} if is_chunk else {})
            for piece in pieces
            for number, call in enumerate(piece.parts.calls)
        ]
        message: Any = {} if is_chunk else {"role": "assistant", "content": None if calls else ""}
        message |= {"content": content} if content else {}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        fields: Any = {"index": pieces[0].answer.index, "finish_reason": pieces[-1].finish_reason}
        scores = [score for piece in pieces for score in piece.scores]
        if scores or (not is_chunk and pieces[0].answer.scores is not None):
            fields["logprobs"] = chat_logprobs(scores)
        return ChunkChoice(delta=message, **fields) if is_chunk else ChatChoice(message=message, **fields)


class TextForm:
    """The JSON of /v1/completions."""

    prefix = "cmpl"

    def response(self, is_chunk: bool, **fields: Any) -> Completion:
        """A response, or an event of a stream."""
        return Completion(object="text_completion", **fields)

    def choice(self, is_chunk: bool, pieces: list[Piece]) -> CompletionChoice:
        """A choice, or a part of it."""
        scores = [score for piece in pieces for score in piece.scores]
        return CompletionChoice.model_construct(
            index=pieces[0].answer.index,
            text="".join(piece.parts.content for piece in pieces),
            logprobs=text_logprobs(scores) if scores else None,
            finish_reason=pieces[-1].finish_reason,
        )


class Service:
    """One model under one name, at both endpoints.

    Args:
        presets: fields of a request by name. max_answer: tokens that a client may ask for.
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, name: str, presets: Mapping[str, Mapping[str, Any]], max_answer: int
    ):
        self.engine, self.model, self.metrics = engine, engine.model, metrics
        self.name, self.presets, self.max_answer = name, presets, max_answer

    def check_name(self, name: Any) -> None:
        """Raise ApiError for the name of another model."""
        if name not in (None, self.name):
            raise ApiError(f"model={shown(name)} is not served here; {self.name!r} is", 404, "model")

    async def chat(self, call: Call, body: ChatBody) -> Response:
        """Answer a body of /v1/chat/completions."""
        self.check_name(body.model)
        changes, tokenizer = read_changes(body, self.presets), self.model.tokenizer
        if "chat" in body.paradec:
            raise ApiError("chat is for /v1/completions; messages are a chat", 422, OWN)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", 422, "top_logprobs")
        tools, required = choose_tools(body)
        template = response_template_of(tokenizer)
        if required and template is not HERMES:
            reason = "is not offered for this model, whose chat template writes no <tool_call> with JSON"
            raise ApiError(f"tool_choice={shown(body.tool_choice)} {reason}", 422, "tool_choice")
        ids, text = await asyncio.to_thread(encode_chat, self.model, body, tools)
        changes["constraint"] = constraint = await self._read_constraint(body, changes, required)
        end = None if constraint else reasoning_end(tokenizer, text)
        make_parser = partial(AnswerParser, end, template if tools else None, tools)
        return await self._respond(call, body, changes, [ids], make_parser, ChatForm())

    async def complete(self, call: Call, body: TextBody) -> Response:
        """Answer a body of /v1/completions."""
        self.check_name(body.model)
        changes = read_changes(body, self.presets)
        rows = await asyncio.to_thread(self._encode_prompts, body)
        changes["constraint"] = await self._read_constraint(body, changes, None)
        make_parser = partial(AnswerParser, None, None, None)
        return await self._respond(call, body, changes, rows, make_parser, TextForm())

    def _encode_prompts(self, body: TextBody) -> list[list[int]]:
        """The ids of each prompt. Raises ApiError."""
        rows, is_chat = [], body.paradec.get("chat", False)
        for prompt in body.prompts:
            if not (prompt.strip() if isinstance(prompt, str) else is_rows_of_ids([prompt])):
                reason = "must be a text with a word in it, a list of ids, or a list of these"
                raise ApiError(f"prompt={shown(prompt)} {reason}", 422, "prompt")
            try:
                rows += encode(self.model, prompt, chat=is_chat if isinstance(prompt, str) else None).rows
            except (ValueError, TypeError) as error:
                raise to_api_error(error, "prompt") from error
        return rows

    async def _read_constraint(self, body: Body, changes: Mapping[str, Any], required: Any) -> Constraint | None:
        """The constraint of a body, whose automaton is made. Raises ApiError."""
        if (form := find_format(body, required)) is None:
            return None
        if changes.get("stop_strings"):
            raise ApiError("stop may end an answer before it has its form; leave it out", 400, "stop")
        return await asyncio.to_thread(read_constraint, *form, self.model)

    async def _respond(
        self,
        call: Call,
        body: ChatBody | TextBody,
        changes: dict[str, Any],
        rows: list[list[int]],
        make_parser: Callable[[], AnswerParser],
        form: ChatForm | TextForm,
    ) -> Response:
        """Submit the answers to each prompt, and respond with them."""
        model, n, count = self.model, body.n or 1, body.num_logprobs
        if len(rows) * n > MAX_CHOICES:
            raise ApiError(f"{len(rows)} prompts with n={n} ask for more than {MAX_CHOICES} answers", 400, "n")
        if any(model.facts.hole_id in row for row in rows):
            raise ApiError("the prompt holds the mask token, and a server fills no masks")
        if count is not None:
            changes["logprobs"] = min(count, model.facts.vocab_size)
            await asyncio.to_thread(spelling_of, model.tokenizer)  # it reads the whole vocabulary once
        echoes = await asyncio.to_thread(self._echo, body, rows) if isinstance(body, TextBody) and body.echo else None
        stops, answers = changes.get("stop_strings") or (), list[Answer]()
        for index in range(len(rows) * n):
            scores = (
                None if count is None else TokenScores(model.tokenizer, len(echoes[index // n][0]) if echoes else 0)
            )
            cutter = StopCutter((stops,) if isinstance(stops, str) else stops)
            is_whole = partial(is_complete, changes["constraint"], model)
            answers.append(Answer(index, rows[index // n], model.tokenizer, cutter, make_parser(), scores, is_whole))
        queue = AnswerQueue(answers, model.facts.mask_token_id)
        for answer in answers:
            self._submit(call, queue, answer, answer.index % n, body, changes)
        begins = (
            []
            if echoes is None
            else [
                Piece(answer, Parts(echoes[answer.index // n][0]), echoes[answer.index // n][1]) for answer in answers
            ]
        )
        form_id = f"{form.prefix}-{uuid.uuid4().hex}"
        head: dict[str, Any] = {"id": form_id, "created": int(time.time()), "model": self.name}
        if body.stream:
            return StreamingResponse(self._events(queue, begins, body, form, head), media_type="text/event-stream")
        pieces = [begins[answer.index : answer.index + 1] for answer in answers]
        async for batch in queue.pieces():
            for piece in batch:
                pieces[piece.answer.index].append(piece)
        choices = [form.choice(False, parts) for parts in pieces]
        return Response(to_json(form.response(False, choices=choices, usage=queue.usage(), **head)), media_type=JSON)

    def _echo(self, body: TextBody, rows: list[list[int]]) -> list[tuple[str, Any]]:
        """The texts of prompts, and the scores of their tokens. Raises ApiError."""
        model, count = self.model, body.num_logprobs
        if body.paradec.get("chat"):
            raise ApiError("echo is for prompts that are no chat", 400, "echo")
        if count is not None and model.facts.topology != "causal":
            reason = "needs a causal model: other models give the tokens of a prompt no log-probabilities"
            raise ApiError(f"echo=true with logprobs {reason}", 400, "echo")
        echoes = []
        for prompt, ids in zip(body.prompts, rows, strict=True):
            scores = TokenScores(model.tokenizer, keeps_special=True)
            if count is not None:
                scores.add(ids, score_prompt(model, ids, min(count, model.facts.vocab_size)))
            text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)
            echoes.append((text, scores.take()))
        return echoes

    def _submit(
        self, call: Call, queue: AnswerQueue, answer: Answer, number: int, body: Body, changes: Mapping[str, Any]
    ) -> None:
        """Give the prompt of an answer, the one of this number to it, to the engine. Raises ApiError."""
        model, facts, ids = self.model, self.model.facts, answer.prompt
        new = changes.get("max_new_tokens", self.engine.batch.request.max_new_tokens)
        if new is None:  # as many as there is room for
            room = min(model.default_max_new_tokens, self.max_answer)
            new = max(1, room if facts.max_length is None else min(room, facts.max_length - len(ids)))
        own: dict[str, Any] = {"max_new_tokens": new, "cache_salt": body.cache_salt}
        if number and isinstance(seed := changes.get("seed"), int):
            own["seed"] = (seed + number) % 2**63
        has_answer = new != 0 or not getattr(body, "echo", False)

        def on_done(ticket: Ticket) -> None:
            self.metrics.record_answer(ticket)
            queue.send(answer, ticket.output)

        try:
            check_int("max_tokens", new, low=1 if has_answer else 0, high=self.max_answer)
            facts.check_length(len(ids) + new, new)
            if not has_answer:
                queue.send(answer, None)
                return
            if changes["constraint"] is not None:
                check_room(changes["constraint"], model, new)
            call.reserve(len(ids) + new)
            has_drafts = body.paradec.get("drafts", False)
            streamer = queue.streamer(answer, has_drafts) if body.stream else None
            call.submit(Prompts([ids], True, [0]), on_done=on_done, streamer=streamer, **{**changes, **own})
        except (ValueError, TypeError, EngineStopped) as error:
            raise to_api_error(error) from error

    async def _events(
        self, queue: AnswerQueue, begins: list[Piece], body: Body, form: ChatForm | TextForm, head: dict[str, Any]
    ) -> AsyncIterator[str]:
        """The server-sent events of a stream."""
        began, started = time.perf_counter(), set[int]()

        def event(choices: Any, **more: Any) -> str:
            return f"data: {to_json(form.response(True, choices=choices, **head, **more))}\n\n"

        try:
            if isinstance(form, ChatForm):
                delta: Any = {"role": "assistant", "content": ""}
                yield "".join(
                    event([ChunkChoice(index=a.index, delta=delta, finish_reason=None)]) for a in queue.answers
                )
            yield "".join(event([form.choice(True, [piece])]) for piece in begins)
            async for batch in queue.pieces():
                for piece in batch:
                    if piece.answer.num_tokens and piece.answer.index not in started:
                        started.add(piece.answer.index)
                        self.metrics.first.observe(time.perf_counter() - began)
                # clients read every line of data as a chunk, and skip comments
                yield "".join(
                    f": {p.draft}\n\n" if p.draft else event([form.choice(True, [p])]) for p in batch if p.is_sent
                )
            if body.includes_usage:
                yield event([], usage=queue.usage())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"


def to_json(response: Any) -> str:
    """Write a response: the fields that were set."""
    return str(response.model_dump_json(exclude_unset=True, warnings=False))
