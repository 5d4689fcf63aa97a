"""The two endpoints: a body is checked and encoded, decoded by the engine, and answered as a whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi.responses import Response, StreamingResponse
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers.decoders import DecodeStream
from torch import Tensor

from paradec.api.output import Output
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.compiler import Compiler
from paradec.constraints.grammar import GrammarTexts
from paradec.core.checks import check_int, shown
from paradec.core.prompts import Prompts, encode
from paradec.integrations.server import chat
from paradec.integrations.server.chat import AnswerParser, Piece, StopCutter
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import ApiError, Call, to_api_error
from paradec.integrations.server.logprobs import TokenScores, chat_logprobs, score_prompt, text_logprobs
from paradec.integrations.server.request_body import ChatBody, TextBody, read_changes, read_constraint

OBJECTS: Any = {Completion: "text_completion", ChatCompletion: "chat.completion"}
OBJECTS |= {ChatCompletionChunk: "chat.completion.chunk"}
MAX_CHOICES = 1024  # answers to one body
MAX_DRAFTS = 4  # waiting events beyond which no draft is added


class Service:
    """One model under one name. presets: fields of a request by name. max_answer: tokens that a client may ask for."""

    def __init__(self, engine: Engine, name: str, presets: Mapping[str, Mapping[str, Any]], max_answer: int):
        self.engine, self.name, self.presets, self.max_answer = engine, name, presets, max_answer
        self.model = engine.model
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
        reply = await asyncio.to_thread(Reply, self, call, body, asyncio.get_running_loop())
        return await reply.respond()


class Answer:
    """One choice of a response. It is the streamer of its row too: `put` and its like run in the engine's thread."""

    def __init__(self, reply: Reply, index: int):
        self.reply, self.index, self._model, prompt = reply, index, reply.service.model, index // reply.n
        self.prompt, self.echo = reply.rows[prompt], reply.echoes[prompt]
        self.num_tokens = self.num_calls = self.num_reused = 0  # reused: tokens of the prompt that were not evaluated
        self._cutter, self._parser = StopCutter(reply.stops), AnswerParser(reply.end, reply.template, reply.tools)
        self._decoder, self._text = DecodeStream([], skip_special_tokens=False), ""
        self._visible, self._num_sent = list[int](), len(self.echo.content)  # characters of the text
        self._scores: TokenScores | None = None
        if reply.changes["logprobs"] is not None:
            self._scores = TokenScores(self._model.tokenizer, self._num_sent, reply.markers)
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

    def _feed(self, ids: list[int], scores: Any, is_last: bool = False) -> Piece:
        """The piece of the next tokens; with the last ones come characters that the decoder holds back."""
        reply, tokenizer = self.reply, self._model.tokenizer
        if reply.body.stream and ids and not self.num_tokens:
            reply.service.engine.metrics.first.observe(time.perf_counter() - reply.began)
        self.num_tokens += len(ids)
        visible = [token for token in ids if token not in reply.hidden]
        self._visible += visible
        if is_last:
            text = tokenizer.decode(self._visible)
            text = text.removeprefix(self._text) if text.startswith(self._text) else ""
        else:
            text = "".join(self._decoder.step(tokenizer._tokenizer, token) or "" for token in visible)
        self._text += text
        text = self._cutter.feed(text, is_last)
        piece = self._parser.feed(text, is_last)
        self.num_calls += len(piece.calls)
        self._num_sent += len(text)
        if self._scores is not None:
            self._scores.add(ids, scores)
            if is_last or any(piece):
                end = math.inf if is_last and not self._cutter.is_over else self._num_sent
                piece = piece._replace(scores=self._scores.take(end))
        return piece

    def finish(self, output: Output) -> Piece:
        """The last piece, of the tokens that were not streamed. Raises ApiError."""
        if output.error is not None:
            raise to_api_error(output.error) from output.error
        ids = output.sequences[0, output.filled[0]][: output.tokens[0]].tolist()
        new, scores, self.num_reused = slice(self.num_tokens, len(ids)), output.logprobs, sum(output.reused)
        if scores is not None:
            scores = scores.map_columns(lambda tensor, _: tensor[:, output.filled[0]][:, new])
        piece, texts = self._feed(ids[new], scores, is_last=True), self.reply.texts
        is_complete = texts.accepts(ids) if isinstance(texts, GrammarTexts) else texts is not None
        if output.finished[0] or self._cutter.is_over or is_complete:
            return piece._replace(finish_reason="tool_calls" if self.num_calls else "stop")
        return piece._replace(finish_reason="length")


class Reply:
    """The `n` answers to each prompt of a body.

    rows: the ids of the prompts. changes: fields of `paradec.Request`. markers, hidden: special tokens that stay in
    texts, and those that do not. echoes: for each prompt the piece that its answers begin with."""

    def __init__(self, service: Service, call: Call, body: ChatBody | TextBody, loop: asyncio.AbstractEventLoop):
        """Check and encode a body, in any thread. Raises ApiError, ValueError, TypeError."""
        self.service, self.call, self.body, self._loop = service, call, body, loop
        self.n, self.is_chat, self.began = body.n or 1, isinstance(body, ChatBody), time.perf_counter()
        self.queue: asyncio.Queue[tuple[Answer, Callable[[], Piece]]] = asyncio.Queue()
        model, defaults = service.model, service.engine.batch.request
        self.changes = read_changes(body, service.presets)
        self.tools = self.template = self.end = required = None
        if isinstance(body, ChatBody):
            self.tools, required = chat.choose_tools(body, model.tokenizer)
            self.template = chat.response_template_of(model.tokenizer) if self.tools else None
            ids, text = chat.encode_chat(model, body, self.tools)
            self.rows, count = [ids], (body.top_logprobs or 0) if body.logprobs else None
        else:
            self.rows, count, text = self._encode(body), body.logprobs, ""
        if any(model.facts.hole_id in row for row in self.rows):
            raise ApiError("the prompt holds the mask token, and a server fills no masks")
        if (size := len(self.rows) * self.n) > MAX_CHOICES:
            raise ApiError(f"{len(self.rows)} prompts with n={self.n} are more than {MAX_CHOICES} answers", 400, "n")
        default = self.changes.get("constraint", defaults.constraint)
        constraint, self.texts = read_constraint(body, required, default, model, service.compiler)
        if constraint is None:
            self.end = chat.reasoning_end(model.tokenizer, text)
        elif self.changes.get("stop_strings"):
            raise ApiError("stop may end an answer before it has its form; leave it out", 400, "stop")
        stops = self.changes.get("stop_strings", defaults.stop_strings) or ()
        self.stops = (stops,) if isinstance(stops, str) else stops
        self.markers = chat.marker_tokens(model.tokenizer, self.template, self.end)
        self.hidden = service.hidden - {*self.markers}
        count = None if count is None else min(count, model.facts.vocab_size)
        self.changes |= {"constraint": constraint, "logprobs": count, "cache_salt": body.cache_salt}
        self.echoes = [Piece() for _ in self.rows]
        if isinstance(body, TextBody) and body.echo:
            self.echoes = [self._echo(*pair) for pair in zip(body.prompt, self.rows, strict=True)]
        self.answers = [Answer(self, index) for index in range(size)]
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": service.name}

    def _encode(self, body: TextBody) -> list[list[int]]:
        """The ids of each prompt. Raises ApiError."""
        model, is_chat = self.service.model, body.paradec.get("chat", False)
        if body.echo and is_chat:
            raise ApiError("echo is for prompts that are no chat", 400, "echo")
        try:
            return [
                encode(model, text, chat=is_chat if isinstance(text, str) else None).rows[0] for text in body.prompt
            ]
        except ValueError as error:
            raise to_api_error(error, "prompt") from error

    def _echo(self, prompt: str | list[int], ids: list[int]) -> Piece:
        """The text of a prompt, with the scores of its tokens. Raises ApiError."""
        model, count = self.service.model, self.changes["logprobs"]
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)
        if count is None:
            return Piece(text)
        if model.facts.topology != "causal":
            raise ApiError("echo=true with logprobs needs a causal model", 400, "echo")
        scores = TokenScores(model.tokenizer, 0, {}, is_prompt=True)
        scores.add(ids, score_prompt(model, ids, count))
        return Piece(text, scores=scores.take())

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
        if isinstance(self.texts, TokenAutomaton) and not self.texts.reach(new)[0]:
            raise ApiError(f"max_tokens={new} is too few: no answer of this form is that short", 400, "max_tokens")
        changes = {**self.changes, "max_new_tokens": new}
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
        events = ""
        try:
            async for answer, piece in self._pieces():
                if piece.draft:  # a comment, since clients read all data as chunks
                    events += f": {piece.draft}\n\n"
                elif any(piece) or (self.is_chat and piece is answer.echo):
                    events += f"data: {self._to_json([self._choice(answer, [piece])])}\n\n"
                if events and self.queue.empty():
                    yield events
                    events = ""
            if self.body.stream_options.get("include_usage"):
                events += f"data: {self._to_json([], usage=self._usage())}\n\n"
            yield f"{events}data: [DONE]\n\n"
        except ApiError as error:
            yield f"{events}data: {json.dumps(error.body)}\n\n"

    def _to_json(self, choices: list[Any], **more: Any) -> str:
        kind: Any = (ChatCompletionChunk if self.body.stream else ChatCompletion) if self.is_chat else Completion
        response = kind(object=OBJECTS[kind], **self._head, choices=choices, **more)
        return str(response.model_dump_json(exclude_unset=True, warnings=False))

    def _choice(self, answer: Answer, pieces: Sequence[Piece]) -> Any:
        """A choice of a response, or of a chunk with one piece."""
        scores = [score for piece in pieces for score in piece.scores]
        content, stream = "".join(piece.content for piece in pieces), self.body.stream
        fields: Any = {"index": answer.index, "finish_reason": pieces[-1].finish_reason}
        if not self.is_chat:
            logprobs = text_logprobs(scores) if scores else None
            return CompletionChoice.model_construct(text=content, logprobs=logprobs, **fields)
        functions = [call.model_dump() for piece in pieces for call in piece.calls]
        calls = [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call} for call in functions]
        if stream:  # the calls of this piece are the last ones so far
            calls = [{"index": index, **call} for index, call in enumerate(calls, answer.num_calls - len(calls))]
        parts: Any = {"content": content, "reasoning_content": "".join(piece.reasoning for piece in pieces)}
        message: Any = {"role": "assistant", "content": None if calls else ""} if pieces[0] is answer.echo else {}
        message |= {name: value for name, value in {**parts, "tool_calls": calls}.items() if value}
        if self.changes["logprobs"] is not None and (scores or not stream):
            fields["logprobs"] = chat_logprobs(scores)
        return {"delta" if stream else "message": message, **fields}

    def _usage(self) -> dict[str, Any]:
        """The tokens of all answers; a prompt counts once."""
        prompt, completion = sum(map(len, self.rows)), sum(answer.num_tokens for answer in self.answers)
        reused = [answer.num_reused for answer in self.answers]
        cached = sum(min(reused[begin : begin + self.n]) for begin in range(0, len(reused), self.n))
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
