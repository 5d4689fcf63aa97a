"""The endpoints: check and encode a body, decode its prompts in the engine, and respond at once or as a stream."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from fastapi.responses import Response, StreamingResponse
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers.decoders import DecodeStream
from torch import Tensor

from paradec.api.decide import TYPES, build_question, check_json, decide, import_decision
from paradec.batching.slots import Cancelled, Ticket
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.compiler import Compiler
from paradec.constraints.grammar import GrammarTexts
from paradec.core.checks import check_int, short_repr
from paradec.core.family_queries import score_prompt
from paradec.core.prompts import Prompts, encode
from paradec.integrations.server import chat
from paradec.integrations.server.chat import AnswerParser, Piece, StopCutter
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import ApiError, Call, to_api_error
from paradec.integrations.server.logprobs import TokenScores, chat_logprobs, text_logprobs
from paradec.integrations.server.request_body import ChatBody, DecisionBody, TextBody, read_changes, read_constraint

MAX_CHOICES = 1024  # maximum number of answers to one body
MAX_WAITING = 4  # drafts are dropped while this many pieces of a reply wait to be sent


class Service:
    """One model, called `name` by clients. presets: by name, fields of `paradec.Request`. max_answer: in tokens."""

    def __init__(self, engine: Engine, name: str, presets: Mapping[str, Mapping[str, Any]], max_answer: int):
        self.engine, self.name, self.presets, self.max_answer = engine, name, presets, max_answer
        self.model = engine.model
        self.compiler = Compiler(self.model.tokenizer, self.model.facts.vocab_size)
        added = self.model.tokenizer.added_tokens_decoder.items()
        self.special = {token: entry.content for token, entry in added if entry.special}

    def check_name(self, name: Any) -> None:
        """Raise ApiError for the name of another model."""
        if name not in (None, self.name):
            raise ApiError(f"model={short_repr(name)} is not served here, but {self.name!r}", 404, "model")

    async def respond(self, call: Call, body: ChatBody | TextBody) -> Response:
        """Check a body and respond. Raises errors that `to_api_error` converts."""
        self.check_name(body.model)
        reply = await asyncio.to_thread(Reply, self, call, body, asyncio.get_running_loop())
        return await reply.respond()


class Answer:
    """One choice of a response, and the streamer of its row. The engine's thread calls `put...` and `end`."""

    def __init__(self, reply: Reply, index: int, echo: Piece):
        self.reply, self.index, self.prompt = reply, index, reply.rows[index // reply.n]
        self._model = reply.service.model
        self.num_tokens = self.num_calls = self.num_reused = 0  # calls: tool calls; reused: tokens from caches
        self.begin, self._num_sent = echo, len(echo.content)  # prepended to the first piece; number of sent characters
        self._cutter, self._parser = StopCutter(reply.stops), AnswerParser(reply.end, reply.template, reply.tools)
        self._decoder, self._text = DecodeStream([], skip_special_tokens=False), ""
        self._scores: TokenScores | None = None
        if reply.changes["logprobs"] is not None:
            self._scores = TokenScores(self._model.tokenizer, self._num_sent, reply.markers)
        self._has_begun, self._put_scores = False, None

    def put(self, ids: Tensor) -> None:
        """Receive the prompt [1, P] at the first call; later the next final ids [1, n] of the answer."""
        if self._has_begun:
            self.reply.send(self, partial(self._feed, ids[0].tolist(), self._put_scores))
        self._has_begun = True

    def put_logprobs(self, scores: Any) -> None:
        """Receive the log-probabilities of the ids of the next `put`."""
        self._put_scores = scores

    def put_draft(self, ids: Tensor) -> None:
        """Receive a draft: the ids [1, n] that follow the final ones and may still change."""
        reply, mask_id, decode = self.reply, self._model.facts.mask_token_id, self._model.tokenizer.decode
        if reply.body.paradec.get("drafts") and reply.queue.qsize() < MAX_WAITING and not self._cutter.is_over:
            texts = [None if token == mask_id else decode([token]) for token in ids[0].tolist()]
            reply.send(self, lambda: Piece(draft=json.dumps({"draft": texts}, ensure_ascii=False)))

    def end(self) -> None:
        """Do nothing: `finish` gets the output."""

    def _feed(self, ids: list[int], scores: Any, full_text: str | None = None) -> Piece:
        # full_text: the text of the whole answer, given in the last call only
        if self.reply.body.stream and ids and not self.num_tokens:
            self.reply.service.engine.metrics.first.observe(time.perf_counter() - self.reply.start_time)
        self.num_tokens, is_last = self.num_tokens + len(ids), full_text is not None
        if full_text is None:
            step = partial(self._decoder.step, self._model.tokenizer._tokenizer)
            text = "".join(step(token) or "" for token in ids if token not in self.reply.hidden)
        else:  # the full text includes characters that the stream decoder held back
            text = full_text.removeprefix(self._text) if full_text.startswith(self._text) else ""
        self._text += text
        text = self._cutter.feed(text, is_last)
        piece, self._num_sent = self._parser.feed(text, is_last), self._num_sent + len(text)
        self.num_calls += len(piece.calls)
        if self._scores is not None:
            self._scores.add(ids, scores)
            if is_last or any(piece):
                end = math.inf if is_last and not self._cutter.is_over else self._num_sent
                piece = piece._replace(scores=self._scores.take(end))
        begin, self.begin = self.begin, Piece()
        content, scores = begin.content + piece.content, [*begin.scores, *piece.scores]
        return piece._replace(content=content, scores=scores, role=begin.role)

    def finish(self, ticket: Ticket) -> Piece:
        """Build the last piece, from the tokens that were not streamed. Raises ApiError if decoding failed."""
        output: Any = ticket.output
        if output.error is not None:
            raise to_api_error(output.error) from output.error
        ids = output.sequences[0, output.filled[0]][: output.tokens[0]].tolist()
        new, scores, self.num_reused = slice(self.num_tokens, len(ids)), output.logprobs, sum(output.reused)
        if scores is not None:
            scores = scores.map_columns(lambda tensor, _: tensor[:, output.filled[0]][:, new])
        text = self._model.tokenizer.decode([token for token in ids if token not in self.reply.hidden])
        piece, texts = self._feed(ids[new], scores, text), self.reply.texts
        is_complete = texts.accepts(ids) if isinstance(texts, GrammarTexts) else texts is not None
        if output.finished[0] or self._cutter.is_over or is_complete:
            return piece._replace(finish_reason="tool_calls" if self.num_calls else "stop")
        return piece._replace(finish_reason="length")


class Reply:
    """The `n` answers to each prompt of a body. changes: arguments of `paradec.Request`, by field.
    markers: special tokens that stay in texts, by id. hidden: ids of the tokens that are removed from texts."""

    def __init__(self, service: Service, call: Call, body: ChatBody | TextBody, loop: asyncio.AbstractEventLoop):
        """Check and encode a body; thread-safe. Raises ApiError, ValueError, TypeError."""
        self.service, self.call, self.body, self._loop = service, call, body, loop
        self.n, self.is_chat, self.start_time = body.n or 1, isinstance(body, ChatBody), time.perf_counter()
        self.queue: asyncio.Queue[tuple[Answer, Callable[[], Piece]]] = asyncio.Queue()
        model, defaults = service.model, service.engine.batch.request
        self.changes = read_changes(body, service.presets)
        self.rows, self.tools, required = list[list[int]](), list[Any](), list[Any]()
        self.template = self.end = None
        if isinstance(body, ChatBody):
            ids, self.tools, required, self.template, self.end = chat.encode_chat(model, body)
            self.rows, count = [ids], (body.top_logprobs or 0) if body.logprobs else None
        else:
            is_chat, count = body.paradec.get("chat", False), body.logprobs
            if body.echo and is_chat:
                raise ApiError("echo does not work with chat=true", 400, "echo")
            try:
                for prompt in body.prompt:
                    self.rows += encode(model, prompt, chat=is_chat if isinstance(prompt, str) else None).rows
            except ValueError as error:
                raise to_api_error(error, "prompt") from error
        if any(model.facts.hole_id in row for row in self.rows):
            raise ApiError("the prompt contains the mask token, and the server fills no masks in prompts")
        if (size := len(self.rows) * self.n) > MAX_CHOICES:
            raise ApiError(f"{len(self.rows)} prompts with n={self.n} are more than {MAX_CHOICES} answers", 400, "n")
        default = self.changes.get("constraint", defaults.constraint)
        constraint, self.texts = read_constraint(body, required, default, model, service.compiler, self.end)
        if constraint is not None:
            self.end = constraint.after if self.is_chat else None
        if constraint is not None and self.changes.get("stop_strings"):
            raise ApiError("stop may end an answer before its constraint is met; leave it out", 400, "stop")
        stops = self.changes.get("stop_strings", defaults.stop_strings) or ()
        self.stops = (stops,) if isinstance(stops, str) else stops
        # special tokens that belong to tool calls, or end the reasoning
        syntax = str(self.template["fields"]["tool_calls"] if self.template else "").replace("\\", "")
        self.markers = {token: text for token, text in service.special.items() if text in syntax + (self.end or "")}
        self.hidden = {*service.special, model.facts.mask_token_id} - {*self.markers}
        self.changes |= {"constraint": constraint, "logprobs": count, "cache_salt": body.cache_salt}
        echoes = [Piece(role="assistant" if self.is_chat else "")] * len(self.rows)
        if isinstance(body, TextBody) and body.echo:
            echoes = [self._echo(*pair) for pair in zip(body.prompt, self.rows, strict=True)]
        self.answers = [Answer(self, index, echoes[index // self.n]) for index in range(size)]
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": service.name}

    def _echo(self, prompt: str | list[int], ids: list[int]) -> Piece:
        model, count = self.service.model, self.changes["logprobs"]
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids, skip_special_tokens=True)
        if count is None:
            return Piece(content=text)
        if model.facts.topology != "causal":
            raise ApiError("echo=true with logprobs needs a causal model", 400, "echo")
        scores = TokenScores(model.tokenizer, 0, {}, is_prompt=True)
        scores.add(ids, score_prompt(model, ids, count))
        return Piece(content=text, scores=scores.take())

    def send(self, answer: Answer, build: Callable[[], Piece]) -> None:
        """Queue a function that builds the answer's next piece in the event loop; thread-safe."""
        self._loop.call_soon_threadsafe(self.queue.put_nowait, (answer, build))

    async def respond(self) -> Response:
        """Submit the prompts; return the response, or its stream. Raises errors that `to_api_error` converts."""
        lengths = [self._choose_length(len(row)) for row in self.rows]
        self.call.reserve(sum(self.n * (len(row) + new) for row, new in zip(self.rows, lengths) if new))
        for answer in self.answers:
            self._submit(answer, lengths[answer.index // self.n])
        if self.body.stream:
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        choices = [None] * len(self.answers)
        async for answer, piece in self._pieces():
            choices[answer.index] = self._build_choice(answer, piece)
        return Response(self._to_json(choices, has_usage=True), media_type="application/json")

    def _choose_length(self, size: int) -> int:
        service, facts = self.service, replace(self.service.model.facts, name=self.service.name)
        limit, new = service.max_answer, self.changes.get("max_new_tokens", service.engine.batch.request.max_new_tokens)
        if new is None:  # the model's default, or fewer if only these fit
            new = max(1, min(service.model.default_max_new_tokens, limit, (facts.max_length or math.inf) - size))
        check_int("max_tokens", new, low=0 if getattr(self.body, "echo", None) else 1)
        if new > limit:
            raise ApiError(f"max_tokens={new} exceeds --max-answer={limit}", 400, "max_tokens")
        facts.check_length(size + new, new)
        if new and isinstance(self.texts, TokenAutomaton) and not self.texts.reach(new)[0]:
            raise ApiError(f"max_tokens={new}: the constraint needs {self.texts.distance[0]} tokens", 400, "max_tokens")
        return int(new)

    def _submit(self, answer: Answer, new: int) -> None:
        if new == 0:
            self.send(answer, lambda: answer.begin._replace(finish_reason="length"))
            return
        changes = {**self.changes, "max_new_tokens": new, "streamer": answer if self.body.stream else None}
        if (number := answer.index % self.n) and isinstance(seed := changes.get("seed"), int):
            changes["seed"] = (seed + number) % 2**63
        prompt = Prompts([answer.prompt], True, [0])
        self.call.submit(prompt, on_done=lambda ticket: self.send(answer, partial(answer.finish, ticket)), **changes)

    async def _pieces(self) -> AsyncIterator[tuple[Answer, Piece]]:
        num_open = len(self.answers)
        while num_open:
            answer, build = await self.queue.get()
            piece = build()
            num_open -= piece.finish_reason is not None
            yield answer, piece

    async def _stream(self) -> AsyncIterator[str]:
        events = ""
        try:
            async for answer, piece in self._pieces():
                if piece.draft:  # an SSE comment: clients parse every data event as a chunk
                    events += f": {piece.draft}\n\n"
                elif any(piece):
                    events += f"data: {self._to_json([self._build_choice(answer, piece)])}\n\n"
                if events and self.queue.empty():
                    yield events
                    events = ""
            if self.body.stream_options.get("include_usage"):
                events += f"data: {self._to_json([], has_usage=True)}\n\n"
            yield f"{events}data: [DONE]\n\n"
        except ApiError as error:
            yield f"{events}data: {json.dumps(error.body)}\n\n"

    def _to_json(self, choices: list[Any], has_usage: bool = False) -> str:
        response: dict[str, Any] = {**self._head, "choices": choices}
        if has_usage:
            prompt, completion = sum(map(len, self.rows)), sum(answer.num_tokens for answer in self.answers)
            reused = [answer.num_reused for answer in self.answers]  # `cached` counts the `n` answers to a prompt once
            cached = sum(min(reused[begin : begin + self.n]) for begin in range(0, len(reused), self.n))
            counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            response["usage"] = {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
        kind: Any = (ChatCompletionChunk if self.body.stream else ChatCompletion) if self.is_chat else Completion
        (name,) = get_args(kind.model_fields["object"].annotation)
        return str(kind(object=name, **response).model_dump_json(exclude_unset=True, warnings=False))

    def _build_choice(self, answer: Answer, piece: Piece) -> Any:
        stream, scores = self.body.stream, piece.scores
        fields: Any = {"index": answer.index, "finish_reason": piece.finish_reason}
        if not self.is_chat:
            logprobs = text_logprobs(scores) if scores else None
            return CompletionChoice.model_construct(text=piece.content, logprobs=logprobs, **fields)
        functions = (call.model_dump() for call in piece.calls)
        calls: Any = [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": f} for f in functions]
        if stream:  # calls are numbered over all pieces of the answer
            calls = [{"index": index, **call} for index, call in enumerate(calls, answer.num_calls - len(calls))]
        parts: Any = {"content": piece.content, "reasoning_content": piece.reasoning, "tool_calls": calls}
        message: Any = {"role": piece.role, "content": None if calls else ""} if piece.role else {}
        message |= {name: value for name, value in parts.items() if value}
        if self.changes["logprobs"] is not None and (scores or not stream):
            fields["logprobs"] = chat_logprobs(scores)
        return {"delta" if stream else "message": message, **fields}


class Decisions:
    """Endpoint of decisions; answers one body at a time. Raises ValueError for a malformed decision.json."""

    def __init__(self, engine: Engine):
        self.model, self._lock = engine.model, asyncio.Lock()
        self.config: Any = None
        folder = str(getattr(self.model.module, "name_or_path", ""))
        try:
            self.config = import_decision().DecisionConfig.from_pretrained(folder if os.path.isdir(folder) else "")
        except ImportError:  # `answer` raises it again
            pass
        except Exception as error:  # the file may cause any kind of error
            raise ValueError(f"decision.json in {folder!r} cannot be read: {short_repr(str(error))}") from error

    async def answer(self, call: Call, body: DecisionBody) -> dict[str, Any]:
        """Answer the questions of a body until the client leaves. Raises errors that `to_api_error` converts."""
        if body.assets:
            raise ApiError("assets (images) are not supported; leave them out", 400, "assets")

        def before_call(tokens: int) -> None:
            if call.has_ended:
                raise Cancelled("the client has left")
            if not call.num_reserved:  # `tokens` are those of all model calls together
                call.reserve(tokens)

        check_json("state", body.state)
        check_json("questions", body.questions)
        try:
            parsed = import_decision().parse_questions(body.questions, self.config)
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(f"questions: {error}", 422, "questions") from error
        if self.config.chat_template is not None:
            raise ApiError("this model has a custom decision_template.jinja, which is not supported")
        questions = {question.name: build_question(question) for question in parsed}
        state = json.dumps(body.state, ensure_ascii=False) if isinstance(body.state, list) else body.state
        temperature = {kind: value for kind, value in self.config.temperature.items() if kind in TYPES}
        ask = partial(decide, self.model, state, questions, temperature=temperature, before_call=before_call)
        async with self._lock:  # bounds the memory
            decisions = await asyncio.to_thread(ask)
        answers = {query.name: query.answer([*decisions[query.name].probabilities.values()]) for query in parsed}
        return {"answers": answers, "usage": {"input_tokens": decisions.input_tokens, "output_tokens": 0}}
