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
from openai.types.completion_usage import PromptTokensDetails
from tokenizers.decoders import DecodeStream
from torch import Tensor

from paradec.api.output import Output
from paradec.constraints.compiler import Compiler
from paradec.constraints.spelling import spelling_of
from paradec.core.checks import check_int, shown
from paradec.core.logprobs import LogProbs
from paradec.core.prompt_ids import is_rows_of_ids
from paradec.core.prompts import Prompts, encode
from paradec.integrations.server import chat, request_body
from paradec.integrations.server.chat import AnswerParser, Piece, StopCutter
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import ApiError, Call, to_api_error
from paradec.integrations.server.logprobs import TokenScores, chat_logprobs, score_prompt, text_logprobs
from paradec.integrations.server.request_body import ChatBody, TextBody

OBJECTS: Any = {Completion: "text_completion", ChatCompletion: "chat.completion"}
OBJECTS |= {ChatCompletionChunk: "chat.completion.chunk"}
MAX_CHOICES = 1024  # answers to one body
MAX_DRAFTS = 4  # waiting events beyond which no draft is added


@dataclass
class Service:
    """One model under one name. presets: fields of a request by name. max_answer: tokens that a client may ask for."""

    engine: Engine
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

    async def respond(self, call: Call, body: ChatBody | TextBody) -> Response:
        """Answer a body. Raises what `to_api_error` converts."""
        self.check_name(body.model)
        return await Reply(self, call, body, **await asyncio.to_thread(self._prepare, body)).respond()

    def _prepare(self, body: ChatBody | TextBody) -> dict[str, Any]:
        """Check and encode a body: the fields of its `Reply`. Raises ApiError, ValueError, TypeError."""
        tokenizer, facts = self.model.tokenizer, self.model.facts
        changes = request_body.read_changes(body, self.presets) | {"constraint": None, "logprobs": None}
        tools = required = template = end = text = None
        if isinstance(body, ChatBody):
            tools, required = chat.choose_tools(body, tokenizer)
            template = chat.response_template_of(tokenizer) if tools else None
            ids, text = chat.encode_chat(self.model, body, tools)
            rows, count = [ids], (body.top_logprobs or 0) if body.logprobs else None
        else:
            rows, count = self._encode_prompts(body), body.logprobs
        if any(facts.hole_id in row for row in rows):
            raise ApiError("the prompt holds the mask token, and a server fills no masks")
        if len(rows) * (n := body.n or 1) > MAX_CHOICES:
            raise ApiError(f"{len(rows)} prompts with n={n} ask for more than {MAX_CHOICES} answers", 400, "n")
        if (form := request_body.find_format(body, required)) is not None:
            if changes.get("stop_strings"):
                raise ApiError("stop may end an answer before it has its form; leave it out", 400, "stop")
            changes["constraint"] = request_body.read_constraint(*form, self.model, self.compiler)
        elif text is not None:
            end = chat.reasoning_end(tokenizer, text)
        if count is not None:
            changes["logprobs"] = count = min(count, facts.vocab_size)
            spelling_of(tokenizer)  # it reads the whole vocabulary once
        echoes = [Piece() for _ in rows]
        if isinstance(body, TextBody) and body.echo:
            echoes = [self._echo(*pair, count) for pair in zip(body.prompt, rows, strict=True)]
        markers = chat.marker_tokens(tokenizer, template, end)
        parser = partial(AnswerParser, end, template, tools)
        return {"changes": changes, "rows": rows, "make_parser": parser, "markers": markers, "echoes": echoes}

    def _encode_prompts(self, body: TextBody) -> list[list[int]]:
        """The ids of each prompt. Raises ApiError."""
        rows, is_chat = list[list[int]](), body.paradec.get("chat", False)
        if body.echo and is_chat:
            raise ApiError("echo is for prompts that are no chat", 400, "echo")
        for prompt in body.prompt:
            if not (prompt.strip() if isinstance(prompt, str) else is_rows_of_ids([prompt])):
                reason = "must be a text with a word in it, a list of ids, or a list of these"
                raise ApiError(f"prompt={shown(prompt)} {reason}", 422, "prompt")
            try:
                rows += encode(self.model, prompt, chat=is_chat if isinstance(prompt, str) else None).rows
            except (ValueError, TypeError) as error:
                raise to_api_error(error, "prompt") from error
        return rows

    def _echo(self, prompt: str | list[int], ids: list[int], count: int | None) -> Piece:
        """The text of a prompt, with the scores of its tokens. Raises ApiError."""
        model = self.model
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)
        if count is None:
            return Piece(text)
        if model.facts.topology != "causal":
            reason = "needs a causal model: others give the tokens of a prompt no log-probabilities"
            raise ApiError(f"echo=true with logprobs {reason}", 400, "echo")
        scores = TokenScores(model.tokenizer, 0, {}, is_prompt=True)
        scores.add(ids, score_prompt(model, ids, count))
        return Piece(text, scores=scores.take())


class Answer:
    """One choice of a response. It is the streamer of its row too: `put` and its like run in the engine's thread."""

    def __init__(self, reply: Reply, index: int):
        self.reply, self.index, self._model, prompt = reply, index, reply.service.model, index // reply.n
        self.prompt, self.echo = reply.rows[prompt], reply.echoes[prompt]
        self.num_tokens = self.num_calls = self.num_reused = 0  # reused: tokens of the prompt that were not evaluated
        stops = reply.changes.get("stop_strings") or ()
        self._cutter, self._parser = StopCutter((stops,) if isinstance(stops, str) else stops), reply.make_parser()
        self._decoder, self._text = DecodeStream([], skip_special_tokens=False), ""
        self._scores: TokenScores | None = None
        if reply.changes["logprobs"] is not None:
            self._scores = TokenScores(self._model.tokenizer, len(self.echo.content), reply.markers)
        self._has_begun, self._put_scores = False, None

    def put(self, ids: Tensor) -> None:
        """Take the prompt [1, P], then ids [1, n] that are final with everything left of them."""
        if self._has_begun:
            self.reply.send(self, partial(self._feed, ids[0].tolist(), self._put_scores))
        self._has_begun = True

    def put_logprobs(self, scores: Any) -> None:
        """Take the log-probabilities of the ids that `put` takes next."""
        self._put_scores = scores

    def put_draft(self, ids: Tensor) -> None:
        """Take ids [1, n] to the right of the final ones."""
        reply, mask_id, decode = self.reply, self._model.facts.mask_token_id, self._model.tokenizer.decode
        if reply.body.paradec.get("drafts") and reply.queue.qsize() < MAX_DRAFTS and not self._cutter.is_over:
            texts = [None if token == mask_id else decode([token]) for token in ids[0].tolist()]
            reply.send(self, lambda: Piece(draft=json.dumps({"draft": texts}, ensure_ascii=False)))

    def end(self) -> None:
        """Do nothing; the output follows."""

    def _feed(self, ids: list[int], scores: LogProbs | None) -> Piece:
        self.num_tokens += len(ids)
        if self._scores is not None and scores is not None:
            self._scores.add(ids, scores)
        step = partial(self._decoder.step, self._model.tokenizer._tokenizer)
        return self._cut("".join(step(token) or "" for token in ids if token not in self.reply.dropped), False)

    def finish(self, output: Output) -> Piece:
        """Add the tokens that were not streamed, and characters that the decoder holds back. Raises ApiError."""
        if output.error is not None:
            raise to_api_error(output.error) from output.error
        ids = output.sequences[0, output.filled[0]][: output.tokens[0]].tolist()
        if self._scores is not None and output.logprobs is not None:
            new = slice(self.num_tokens, len(ids))
            self._scores.add(
                ids[new], output.logprobs.map_columns(lambda tensor, _: tensor[:, output.filled[0]][:, new])
            )
        self.num_tokens, self.num_reused = len(ids), sum(output.reused)
        text = self._model.tokenizer.decode([token for token in ids if token not in self.reply.dropped])
        piece = self._cut(text.removeprefix(self._text) if text.startswith(self._text) else "", True)
        is_whole = output.finished[0] or self._cutter.is_over
        if is_whole or request_body.is_complete(self.reply.changes["constraint"], self._model, ids):
            return piece._replace(finish_reason="tool_calls" if self.num_calls else "stop")
        return piece._replace(finish_reason="length")

    def _cut(self, text: str, is_last: bool) -> Piece:
        self._text += text
        text = self._cutter.feed(text, is_last)
        piece = self._parser.feed(text, is_last)
        self.num_calls += len(piece.calls)
        if self._scores is not None:
            self._scores.num_sent += len(text)
            if is_last or any(piece):
                piece = piece._replace(scores=self._scores.take(takes_all=is_last and not self._cutter.is_over))
        return piece


@dataclass
class Reply:
    """The `n` answers to each prompt of a body.

    changes: fields of `paradec.Request`. rows: the ids of the prompts. markers: special tokens that stay in texts.
    echoes: for each prompt the piece that its answers begin with."""

    service: Service
    call: Call
    body: ChatBody | TextBody
    changes: dict[str, Any]
    rows: list[list[int]]
    make_parser: Callable[[], AnswerParser]
    markers: dict[int, str]
    echoes: Sequence[Piece]

    def __post_init__(self) -> None:
        self.n, self.is_chat = self.body.n or 1, isinstance(self.body, ChatBody)
        self.dropped = self.service.hidden - {*self.markers}
        self.answers = [Answer(self, index) for index in range(len(self.rows) * self.n)]
        self.queue: asyncio.Queue[tuple[Answer, Callable[[], Piece]]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        name = "chatcmpl" if self.is_chat else "cmpl"
        self._head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.service.name}

    def send(self, answer: Answer, read: Callable[[], Piece]) -> None:
        """Queue the next piece of an answer for the event loop, from any thread."""
        self._loop.call_soon_threadsafe(self.queue.put_nowait, (answer, read))

    async def respond(self) -> Response:
        """Give the prompts to the engine; return the response, or its stream. Raises what `to_api_error` converts."""
        for answer in self.answers:
            self._submit(answer)
        if self.body.stream:
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async for answer, piece in self._pieces():
            pieces[answer.index].append(piece)
        choices = [self._choice(*pair) for pair in zip(self.answers, pieces)]
        return Response(self._to_json(choices, usage=self._usage()), media_type="application/json")

    def _submit(self, answer: Answer) -> None:
        service, facts, size = self.service, self.service.model.facts, len(answer.prompt)
        new = self.changes.get("max_new_tokens", service.engine.batch.request.max_new_tokens)
        if new is None:  # as many as there is room for
            room = min(service.model.default_max_new_tokens, service.max_answer)
            new = max(1, room if facts.max_length is None else min(room, facts.max_length - size))
        check_int("max_tokens", new, low=0 if getattr(self.body, "echo", None) else 1, high=service.max_answer)
        facts.check_length(size + new, new)
        self.send(answer, lambda: answer.echo)
        if new == 0:
            self.send(answer, lambda: Piece(finish_reason="length"))
            return
        if self.changes["constraint"] is not None:
            request_body.check_room(self.changes["constraint"], service.model, new)
        changes = {**self.changes, "max_new_tokens": new, "cache_salt": self.body.cache_salt}
        if (number := answer.index % self.n) and isinstance(seed := changes.get("seed"), int):
            changes["seed"] = (seed + number) % 2**63
        self.call.reserve(size + new)
        self.call.submit(
            Prompts([answer.prompt], True, [0]),
            on_done=lambda ticket: self.send(answer, partial(answer.finish, ticket.output)),
            streamer=answer if self.body.stream else None,
            **changes,
        )

    async def _pieces(self) -> AsyncIterator[tuple[Answer, Piece]]:
        """Pieces as they come, until all answers have ended. Raises ApiError if one fails."""
        num_open = len(self.answers)
        while num_open:
            answer, read = await self.queue.get()
            piece = read()
            num_open -= piece.finish_reason is not None
            yield answer, piece

    async def _stream(self) -> AsyncIterator[str]:
        began, started, events = time.perf_counter(), set[int](), ""
        try:
            role: Any = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for answer in self.answers if self.is_chat else []:
                yield f"data: {self._to_json([{'index': answer.index, **role}])}\n\n"
            async for answer, piece in self._pieces():
                if answer.num_tokens and answer.index not in started:
                    started.add(answer.index)
                    self.service.engine.metrics.first.observe(time.perf_counter() - began)
                if piece.draft:  # a comment, since clients read all data as chunks
                    events += f": {piece.draft}\n\n"
                elif any(piece):
                    events += f"data: {self._to_json([self._choice(answer, [piece])])}\n\n"
                if events and self.queue.empty():
                    yield events
                    events = ""
            if self.body.stream_options.include_usage:
                events += f"data: {self._to_json([], usage=self._usage())}\n\n"
            yield f"{events}data: [DONE]\n\n"
        except ApiError as error:
            yield f"{events}data: {json.dumps(error.body)}\n\n"

    def _to_json(self, choices: list[Any], **more: Any) -> str:
        kind: Any = (ChatCompletionChunk if self.body.stream else ChatCompletion) if self.is_chat else Completion
        response = kind(object=OBJECTS[kind], **self._head, choices=choices, **more)
        return str(response.model_dump_json(exclude_unset=True, warnings=False))

    def _choice(self, answer: Answer, pieces: Sequence[Piece]) -> Any:
        scores = [score for piece in pieces for score in piece.scores]
        content, stream = "".join(piece.content for piece in pieces), self.body.stream
        fields: Any = {"index": answer.index, "finish_reason": pieces[-1].finish_reason}
        if not self.is_chat:
            logprobs = text_logprobs(scores) if scores else None
            return CompletionChoice.model_construct(text=content, logprobs=logprobs, **fields)
        functions = [call.model_dump() for piece in pieces for call in piece.calls]
        calls: list[dict[str, Any]] = [
            {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call} for call in functions
        ]
        if stream:  # the calls of this piece are the last ones so far
            first = answer.num_calls - len(calls)
            calls = [{"index": index, **call} for index, call in enumerate(calls, first)]
        reasoning = "".join(piece.reasoning for piece in pieces)
        message: Any = {} if stream else {"role": "assistant", "content": None if calls else ""}
        parts: dict[str, Any] = {"content": content, "reasoning_content": reasoning, "tool_calls": calls}
        message |= {name: value for name, value in parts.items() if value}
        if self.changes["logprobs"] is not None and (scores or not stream):
            fields["logprobs"] = chat_logprobs(scores)
        return {"delta" if stream else "message": message, **fields}

    def _usage(self) -> CompletionUsage:
        """The tokens of all answers; a prompt counts once."""
        prompt, completion = sum(map(len, self.rows)), sum(answer.num_tokens for answer in self.answers)
        reused = [answer.num_reused for answer in self.answers]
        cached = sum(min(reused[begin : begin + self.n]) for begin in range(0, len(reused), self.n))
        counts: Any = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return CompletionUsage(**counts, prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))
