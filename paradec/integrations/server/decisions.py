"""/v1/systemone: typed questions about a state, as transformers' server takes and answers them (`paradec.decide`)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.decision import DecisionConfig, parse_questions
from transformers.decision.configuration_utils import DECISION_CONFIG_NAME, DECISION_TEMPLATE_NAME

from paradec.api.decisions.decide import Plan
from paradec.api.decisions.questions import TYPES, Question
from paradec.batching.slots import Cancelled
from paradec.core.checks import shown
from paradec.integrations.server.asked import Refused
from paradec.integrations.server.handlers import Handler
from paradec.integrations.server.hosts import CALL, Models, State

MAX_MESSAGE = 2000  # characters: a message may quote what a client sent


class SystemOne(Handler, SystemOneHandler):
    """Bodies are checked by transformers' handler, prompts are those of its pipeline, answers are its questions'."""

    def __init__(self, models: Models, state: State):
        super().__init__(models, state, {})
        self.decision_config = read_config(models.engine.model)
        self._turn = asyncio.Lock()
        """One request at a time is read, so that many of them do not share the machine's memory."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> JSONResponse:
        """Check, lay out the rows, count them as work, read them."""
        name, *_ = self._resolve_model(body)
        questions, plan = await asyncio.to_thread(self._plan, body)
        engine, work, call = self.generation_state.engine, self.generation_state.manager.work, CALL.get()
        if not engine.alive:
            raise CBWorkerDeadError("the engine has stopped")
        count = plan.evaluated
        work.take(count, engine.retry_after())
        call.on_end.append(lambda: work.give_back(count))

        def before_call() -> None:
            if call.ended:
                raise Cancelled("the client has gone")

        async with self._turn:
            try:
                decisions = await asyncio.to_thread(plan.answer, before_call)
            except (Cancelled, FloatingPointError) as error:
                raise HTTPException(503 if isinstance(error, Cancelled) else 500, str(error)) from error
        answers = {one.name: one.answer([*decisions[one.name].probabilities.values()]) for one in questions}
        usage = {"input_tokens": decisions.input_tokens, "output_tokens": 0}
        return JSONResponse({"model": name, "answers": answers, "usage": usage})

    def _plan(self, body: dict[str, Any]) -> tuple[list[Any], Plan]:
        """transformers' questions, and their plan. Raises Refused."""
        config = self.decision_config
        try:
            request = SystemOneHandler._validate_request(self, body)
        except HTTPException as error:
            details: Any = error.detail
            places = [[str(part) for part in item["loc"][1:]] for item in details]
            lines = [f"{shown('.'.join(place))[1:-1]}: {item['msg']}" for place, item in zip(places, details)]
            raise Refused("; ".join(lines)[:MAX_MESSAGE], error.status_code, "".join(places[0][:1])[:80]) from error
        except RecursionError:
            raise Refused("questions are nested too deeply", 422, "questions") from None
        if config.chat_template is not None:
            raise Refused(f"this model asks with its own {DECISION_TEMPLATE_NAME}, which is not supported here")
        if request.assets:
            raise Refused("assets are images, and this server answers about text; leave them out", 400, "assets")
        questions = parse_questions(request.questions, config)
        asked = {question.name: to_question(question) for question in questions}
        temperature = {kind: float(value) for kind, value in config.temperature.items() if kind in TYPES}
        try:
            return questions, Plan(self.generation_state.engine.model, request.state, asked, temperature=temperature)
        except (ValueError, TypeError) as error:
            raise Refused(str(error)[:MAX_MESSAGE]) from error


def to_question(question: Any) -> Question:
    """A question of transformers as a plan has it."""
    value_of: Any = {"noul": lambda option: option == "true", "choice": str, "score": int}[question.type]
    values = tuple(map(value_of, question.options))
    return Question(question.type, question.instructions, [*question.labels], [*question.descriptions], values)


def read_config(model: Any) -> DecisionConfig:
    """The decision.json in a checkpoint's folder; transformers' defaults where there is none. Raises ValueError for a
    file that cannot be read."""
    folder = getattr(model.module, "name_or_path", None)
    try:
        return DecisionConfig.from_pretrained(folder if isinstance(folder, str) and os.path.isdir(folder) else "")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{DECISION_CONFIG_NAME} in {folder!r} cannot be read: {shown(str(error))}") from error
