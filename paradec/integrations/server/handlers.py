"""The two endpoints: transformers' handlers, with bodies that are checked and read by `asked`."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from openai.types.completion_usage import PromptTokensDetails
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from paradec.constraints.values import Constraint
from paradec.core.checks import shown
from paradec.integrations.server import asked, formats, scores, tools
from paradec.integrations.server.asked import Asked, Refused
from paradec.integrations.server.choices import merged, read_count, together, with_scores
from paradec.integrations.server.hosts import CALL, Models, State
from paradec.integrations.server.streams import Draft

ERROR = re.compile(r'data: \{"error": ("(?:[^"\\]|\\.)*")\}\n\n\Z')
"""How transformers' handlers end a stream that failed."""
CONFIG = 5
"""Where among the arguments of transformers' handlers the generation config is."""
NOT_FOR_TEMPLATES = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Names that no variable of a chat template may have: a template among them, which would be a client's program."""
NOT_FOR_TEMPLATES -= {"documents"}  # which is one


class Handler(BaseHandler):
    """What both have in common."""

    fields: tuple[str, ...] = ()
    form: Callable[[Sequence[scores.Score]], Any]
    """How the endpoint writes log-probabilities."""
    scored: Callable[[Mapping[str, Any]], int | None]
    """How many likeliest tokens a body asks for."""

    def __init__(self, models: Models, state: State, presets: Mapping[str, Mapping[str, Any]]):
        super().__init__(models, state)
        self.presets = presets

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """As transformers', with the prompt read in a thread."""
        self._validate_request(body)
        CALL.get().inputs, CALL.get().constraint = await asyncio.to_thread(self._prepared, body)
        return await super().handle_request(body, request_id)

    def _prepared(self, body: Mapping[str, Any]) -> tuple[BatchEncoding, Constraint | None]:
        """The ids of a body that was checked, and what its answer must be."""
        model, found = self.generation_state.engine.model, self._format(body)
        if found is not None:
            formats.prepare(*found, model)
        return self._read(body), None if found is None else found[1]

    def _format(self, body: Mapping[str, Any]) -> tuple[str, Constraint] | None:
        """Which field says what an answer must be, and what."""
        return formats.read(body)

    def _read(self, body: Mapping[str, Any]) -> BatchEncoding:
        """The ids of a body that was checked."""
        raise NotImplementedError

    def _validate_request(self, body: dict[str, Any]) -> None:
        asked.check_fields(body, (*self.fields, *formats.FIELDS))

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        name = self.model_manager.force_model
        requested = body.get("model")
        if requested is not None and requested != name:
            raise Refused(f"model={shown(requested)} is not served here; {name!r} is", 404, "model")
        model, processor = self.model_manager.load_model_and_processor(name)
        return name, model, processor

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False
    ) -> Asked:
        found = asked.read(body, self.presets)
        if (constraint := CALL.get().constraint) is not None:
            found.changes["constraint"] = constraint
            if found.stops:
                raise Refused(
                    "stop may end an answer before it has the form that is asked for; leave it out", 400, "stop"
                )
        found.count = read_count(body)
        if (count := self.scored(body)) is not None:
            found.changes["logprobs"] = min(count, self.generation_state.engine.model.facts.vocab_size)
        return found

    def _streaming(self, *arguments: Any, **named: Any) -> StreamingResponse:
        each = [super(Handler, self)._streaming(*given, **named) for given in one_by_one(arguments)]
        response, bodies = each[0], [response.body_iterator for response in each]
        response.body_iterator = to_the_end(bodies[0] if len(bodies) == 1 else merged(bodies))
        return response

    async def _non_streaming(self, *arguments: Any, **named: Any) -> JSONResponse:
        each = one_by_one(arguments)
        found = await asyncio.gather(*(super(Handler, self)._non_streaming(*given, **named) for given in each))
        bodies = [json.loads(response.body) for response in found]
        return together(bodies, [given[CONFIG] for given in each], self.form, cached_tokens())


class Chat(Handler, ChatCompletionHandler):
    """/v1/chat/completions"""

    fields = ("messages", "tools", "tool_choice", "chat_template_kwargs", "n", "logprobs", "top_logprobs")
    form, scored = staticmethod(scores.of_chat), staticmethod(scores.read_chat)

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        tools.check_messages(body.get("messages"))
        tools.offered(body)
        options = body.get("chat_template_kwargs", {})
        if not isinstance(options, dict):
            raise Refused("chat_template_kwargs must be an object", 422, "chat_template_kwargs")
        for name in options:
            if name in NOT_FOR_TEMPLATES:
                raise Refused(
                    f"chat_template_kwargs: {name} is for the server to choose; give variables of the template",
                    422,
                    "chat_template_kwargs",
                )
        own = body.get(asked.OWN)
        if isinstance(own, Mapping) and "chat" in own:
            raise Refused("chat is for /v1/completions; messages are a chat", 422, asked.OWN)

    def _format(self, body: Mapping[str, Any]) -> tuple[str, Constraint] | None:
        found, calls = super()._format(body), tools.required(body, self.model_manager.processor.response_template)
        if found is not None and calls is not None:
            raise Refused(f"{found[0]} and tool_choice both say what an answer must be; give one", 400, found[0])
        return found if calls is None else ("tool_choice", calls)

    def _read(self, body: Mapping[str, Any]) -> BatchEncoding:
        messages = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        return self.model_manager.processor.read_chat(
            messages, tools.offered(body), body.get("chat_template_kwargs", {})
        )

    def get_processor_inputs_from_messages(self, messages: Any, modality: Any) -> Any:  # type: ignore[override]
        """Messages as the chat template takes them."""
        try:
            return super().get_processor_inputs_from_messages(messages, modality)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise Refused(f"messages cannot be read: {type(error).__name__} {error}", 422, "messages") from error

    def _build_chunk_sse(self, request_id: str = "", content: str | None = None, *more: Any, **named: Any) -> str:
        if isinstance(content, Draft):
            return comment(content)
        event = super()._build_chunk_sse(request_id, content, *more, **with_cached(named))
        return with_scores(event, self.form(content.scores)) if isinstance(content, scores.Scored) else event


class Completions(Handler, CompletionHandler):
    """/v1/completions: text as it is, without the chat template unless the body says so."""

    fields = ("prompt", "suffix", "n", "logprobs")
    form, scored = staticmethod(scores.of_text), staticmethod(scores.read_text)

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        own = body.get(asked.OWN) or {}
        chat = own.get("chat", False) if isinstance(own, Mapping) else False
        if not isinstance(chat, bool):
            raise Refused(f"chat={shown(chat)} must be true or false", 422, asked.OWN)
        if not isinstance(body.get("prompt"), str) or not body["prompt"].strip():
            raise Refused(f"prompt={shown(body.get('prompt'))} must be one text with a word in it", 422, "prompt")
        if body.get("suffix") is not None:
            raise Refused("suffix is not offered; leave it out", 422, "suffix")

    def _read(self, body: Mapping[str, Any]) -> BatchEncoding:
        own = body.get(asked.OWN) or {}
        return self.model_manager.processor.read_text(body["prompt"], own.get("chat", False))

    def _build_chunk_sse(self, request_id: str, model_id: str, text: str = "", *more: Any, **named: Any) -> str:
        if isinstance(text, Draft):
            return comment(text)
        event = super()._build_chunk_sse(request_id, model_id, text, *more, **with_cached(named))
        return with_scores(event, self.form(text.scores)) if isinstance(text, scores.Scored) else event


def cached_tokens() -> int:
    """Of the prompt of this request those that no answer had to evaluate."""
    outputs = [ticket.output for ticket in CALL.get().tickets if ticket.output is not None]
    return min((sum(output.reused) for output in outputs), default=0)


def with_cached(named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an answer whose `usage`, if there is one, says how many tokens of the prompt were not evaluated."""
    usage = named.get("usage")
    if usage is None:
        return named
    details = PromptTokensDetails(cached_tokens=cached_tokens())
    return named | {"usage": usage.model_copy(update={"prompt_tokens_details": details})}


def one_by_one(arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments of a handler for each answer by itself."""
    return [(*arguments[:CONFIG], own, *arguments[CONFIG + 1 :]) for own in arguments[CONFIG].each()]


def comment(draft: Draft) -> str:
    """A draft as a comment of the stream: clients of OpenAI's read the data of every event as a chunk, and pass over
    comments."""
    return f": {draft}\n\n"


async def to_the_end(parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Parts of a stream, with an error as OpenAI writes it, and the end mark where there was none."""
    async for part in parts:
        found = ERROR.search(part) if isinstance(part, str) else None
        if found:
            error = {"message": json.loads(found[1]), "type": "server_error", "param": None, "code": None}
            yield part[: found.start()] + f"data: {json.dumps({'error': error})}\n\n"
            return
        yield part
    yield "data: [DONE]\n\n"
