"""Where transformers' server asks for a model and for its generation: the engine, in both places."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import torch
from fastapi import HTTPException
from transformers import BatchEncoding
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBWorkerDeadError,
    GenerationState,
    Modality,
    _StreamError,
    response_events_to_chunks,
)

from paradec.api.generate import Output
from paradec.batching.slots import Cancelled, Ticket
from paradec.constraints.automaton import ConstraintSizeError
from paradec.constraints.values import Constraint
from paradec.core.checks import check_int
from paradec.core.prompts import encode
from paradec.integrations.server import formats
from paradec.integrations.server.asked import Asked, Refused
from paradec.integrations.server.engine import Engine, EngineStopped
from paradec.integrations.server.metrics import Metrics
from paradec.integrations.server.scores import Scores
from paradec.integrations.server.streams import BROKEN, TextStream, cut_off
from paradec.integrations.server.tools import template_of


class Work:
    """Tokens of the requests that are being answered or wait, prompts and possible answers. One thread at a time.

    Args:
        most: of them all together.
    """

    def __init__(self, most: int):
        self.most, self.held = most, 0

    def take(self, tokens: int, retry_after: int) -> None:
        """Count the tokens of one answer, its prompt's and those that it may have.

        Raises:
            Refused: they never fit (400), or do not fit now (429, to be tried again after so many seconds).
        """
        if tokens > self.most:
            raise Refused(f"{tokens} tokens of prompt and answer are more than this server takes, {self.most}", 400)
        if self.held + tokens > self.most:
            raise Refused(
                f"{self.held} tokens are being answered or wait, and {tokens} more are beyond {self.most}; try again",
                429,
                retry_after=retry_after,
            )
        self.held += tokens

    def give_back(self, tokens: int) -> None:
        """An answer has ended."""
        self.held -= tokens


class HttpCall:
    """One HTTP request: what it has in the batch. The gate makes one, and ends it when the client has gone."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.tickets: list[Ticket] = []
        self.ended = False
        self.inputs: BatchEncoding | None = None
        """The ids of its prompt, once they are read."""
        self.constraint: Constraint | None = None
        """What its answer must be."""
        self.on_end: list[Callable[[], None]] = []
        """What is called when it ends."""

    def add(self, ticket: Ticket) -> None:
        """It belongs to this request. A client may go away before its prompt is in the batch."""
        self.tickets.append(ticket)
        if self.ended:
            self.engine.cancel(ticket)

    def end(self) -> None:
        """Take back what is not answered."""
        self.ended = True
        while self.on_end:
            self.on_end.pop()()
        for ticket in self.tickets:
            self.engine.cancel(ticket)


CALL: contextvars.ContextVar[HttpCall] = contextvars.ContextVar("paradec_call")
"""The request that is being handled in this context."""


class Hosted:
    """The model as the handlers look at it."""

    def __init__(self, model: Any, name: str):
        self.name_or_path, self.device, self.config = name, torch.device("cpu"), model.module.config
        self.generation_config = None  # what is asked comes from the body and the engine's own request


class Processor:
    """The tokenizer as the handlers call it; else the tokenizer itself. What they ask ids of was read before, in a
    thread: a long text must not keep the event loop from other clients."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.tokenizer, name)

    @property
    def response_template(self) -> Any:
        """How answers are read."""
        return template_of(self._model.tokenizer)

    def __call__(self, *_: Any, **__: Any) -> BatchEncoding | None:
        """The ids of this request."""
        return CALL.get().inputs

    apply_chat_template = __call__

    def parse_response(self, ids: Any, *arguments: Any, **named: Any) -> Any:
        """An answer's text and calls; all of it as text where a call in it cannot be read."""
        try:
            found = self._model.tokenizer.parse_response(ids, *arguments, **named)
            response_events_to_chunks(
                [
                    {"type": "region_close", "field": "tool_calls", "value": call}
                    for call in found.get("tool_calls") or []
                ]
            )
        except BROKEN:
            return {"content": self._model.tokenizer.decode(ids, skip_special_tokens=True)}
        return found

    def read_text(self, prompt: str, chat: bool) -> BatchEncoding:
        """The ids of a text as it is, or as a user's turn."""
        return self._encoded(prompt, chat)

    def read_chat(self, messages: Any, tools: Any, options: Mapping[str, Any]) -> BatchEncoding:
        """The ids of a chat, with the checks of `paradec.core.prompts`. Tools and options are for the template's
        code."""
        calls = any("tool_calls" in message or "tool_call_id" in message for message in messages)
        if not tools and not options and not calls:
            return self._encoded(messages, None)
        tokenizer = self._model.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # the template's own code, on data of a client
            param = "tools" if tools else "messages"
            raise Refused(f"the chat template does not take this: {error}", 400, param) from error
        return self._encoded(tokenizer(text, add_special_tokens=False)["input_ids"], None)

    def _encoded(self, prompt: Any, chat: bool | None) -> BatchEncoding:
        try:
            rows = encode(self._model, prompt, chat=chat).rows
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from error
        return BatchEncoding({"input_ids": torch.tensor(rows)})


class Models(ModelManager):
    """The one model that is served, under one name."""

    def __init__(self, engine: Engine, name: str):
        super().__init__(device="cpu", model_timeout=-1)
        self.engine, self.force_model = engine, name
        self.hosted, self.processor = Hosted(engine.model, name), Processor(engine.model)

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> tuple[Any, Any]:
        """It is loaded."""
        return self.hosted, self.processor

    async def load_model_streaming(self, *_: Any, **__: Any) -> AsyncGenerator[str, None]:
        """Not offered: its route is taken away."""
        return
        yield ""

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:  # type: ignore[override]
        """Text."""
        return Modality.LLM

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """What /v1/models lists: this model, and not the hub's cache."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "paradec"}]

    def shutdown(self) -> None:
        """The server ends: so does the engine."""
        self.engine.close()


class Manager(BaseGenerateManager):
    """Generation: prompts go to the engine, and its answers to the handlers."""

    def __init__(self, engine: Engine, metrics: Metrics, max_answer: int, work: Work):
        self.engine, self.metrics, self.max_answer, self.work = engine, metrics, max_answer, work

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Asked,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], TextStream]:
        """Start an answer. The queue gets text that is final with everything left of it final."""
        facts = self.engine.model.facts
        stream = TextStream(
            self.engine.model.tokenizer,
            gen_config.stops,
            response_parser,
            mask=facts.mask_token_id if gen_config.drafts else None,
            on_first=self.metrics.first_text(),
            scored="logprobs" in gen_config.changes,
        )

        def done(ticket: Ticket) -> None:
            output = ticket.output
            assert output is not None
            self._count(inputs, ticket)
            gen_config.settle(output.finished[0])
            # the handler writes the message into JSON text as it is
            failed = None if output.error is None else _StreamError(_quoted(str(output.error) or "the answer failed"))
            stream.finish(str(output.text), failed)

        ticket = self._submit(inputs, gen_config, request_id, done, stream)
        stream.cancel = lambda: self.engine.cancel(ticket)
        return stream.queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Asked, request_id: str
    ) -> tuple[str, int, list[int]]:
        """A whole answer: its text, how long the prompt was, its ids."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def done(ticket: Ticket) -> None:
            self._count(inputs, ticket)
            loop.call_soon_threadsafe(wake)

        ticket = self._submit(inputs, gen_config, request_id, done, None)
        await future
        output = ticket.output
        assert output is not None
        if isinstance(output.error, Cancelled):
            raise HTTPException(503, "the answer was broken off: the server is stopping, or the client has gone")
        if isinstance(output.error, EngineStopped):
            raise CBWorkerDeadError(str(output.error))
        if output.error is not None:
            status = 400 if isinstance(output.error, (ValueError, TypeError)) else 500
            if isinstance(output.error, ConstraintSizeError):
                status = 422
            raise HTTPException(status, str(output.error))
        gen_config.settle(output.finished[0])
        text, ids = cut_off(str(output.text), gen_config.stops), _ids(output).tolist()
        if output.logprobs is not None:
            scores, filled = Scores(self.engine.model.tokenizer), output.filled[0]
            scores.feed(ids, output.logprobs.placed(lambda tensor, _: tensor[:, filled][:, : len(ids)]))
            gen_config.scores = scores.until(len(text))
        return text, inputs["input_ids"].shape[-1], ids

    def stop(self) -> None:
        """End the engine."""
        self.engine.close()

    def _submit(self, inputs: Any, asked: Asked, request_id: str, done: Any, streamer: Any) -> Ticket:
        ids, model, facts = inputs["input_ids"][0], self.engine.model, self.engine.model.facts
        new = asked.changes.get("max_new_tokens", self.engine.batch.request.max_new_tokens)
        changes = dict(asked.changes)
        if new is None:  # as much as there is room for
            room = min(model.default_max_new_tokens, self.max_answer)
            if facts.max_length is not None:
                room = min(room, facts.max_length - len(ids))
            changes["max_new_tokens"] = new = max(1, room)
        changes.pop("chat", None)  # the prompt is ids by now
        changes["cache_salt"] = asked.cache_salt
        try:
            check_int("max_tokens", new, low=1, high=self.max_answer)
            facts.check_length(len(ids) + new, new)
            if (constraint := changes.get("constraint")) is not None:
                formats.check_room(constraint, model, new)
            count, call = len(ids) + new, CALL.get()
            self.work.take(count, self.engine.retry_after())
            call.on_end.append(lambda: self.work.give_back(count))
            ticket = self.engine.submit(ids, on_done=done, streamer=streamer, id=request_id, **changes)
        except Refused:
            raise
        except (ValueError, TypeError) as error:
            raise Refused(str(error)) from error
        except EngineStopped as error:
            raise CBWorkerDeadError(str(error)) from error
        call.add(ticket)
        return ticket

    def _count(self, inputs: Any, ticket: Ticket) -> None:
        output = ticket.output
        assert output is not None
        self.metrics.answer(inputs["input_ids"].shape[-1], output)
        self.metrics.times(ticket, output.tokens[0])


class State(GenerationState):
    """Which generation manager a model has: the one there is."""

    def __init__(self, engine: Engine, metrics: Metrics, max_answer: int, work: Work):
        super().__init__()
        self.engine, self.manager = engine, Manager(engine, metrics, max_answer, work)

    def use_continuous_batching(self, model: Any, modality: Modality) -> bool:
        """No: that is transformers' own, for causal models."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> Manager:  # type: ignore[override]
        """The engine's."""
        return self.manager

    def is_cb_alive(self) -> bool:
        """What /health asks."""
        return self.engine.alive

    def shutdown(self) -> None:
        """End the engine."""
        self.manager.stop()


def _ids(output: Output) -> torch.Tensor:
    """[N] int64: the ids of an answer, its end token included and the padding after it excluded."""
    return output.sequences[0, output.filled[0]][: output.tokens[0]]


def _quoted(text: str) -> str:
    return json.dumps(text)[1:-1]
