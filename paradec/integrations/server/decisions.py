"""/v1/systemone: typed questions about a state, as transformers' server takes and answers them (`paradec.decide`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.decision import DecisionConfig, parse_questions

from paradec.api.decisions.decide import TYPES, Plan, planned
from paradec.api.decisions.questions import Asked
from paradec.batching.slots import Cancelled
from paradec.core.checks import shown
from paradec.core.text_files import read_text
from paradec.integrations.server.asked import Refused
from paradec.integrations.server.handlers import Handler
from paradec.integrations.server.hosts import CALL, Models, State

SETTINGS, TEMPLATE = "decision.json", "decision_template.jinja"
"""What transformers' decision models have beside their weights."""
LONGEST = 2000
"""Characters of a message, which may quote what a client sent."""
VALUES = {"true": True, "false": False}


class SystemOne(Handler, SystemOneHandler):
    """Bodies are checked by transformers' handler, prompts are those of its pipeline, answers are its questions'."""

    def __init__(self, models: Models, state: State):
        super().__init__(models, state, {})
        self.decision_config = config_of(models.engine.model)
        self._turn = asyncio.Lock()
        """One request at a time is read, so that many of them do not share the machine's memory."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> JSONResponse:
        """Check, lay out the rows, count them as work, read them."""
        name, *_ = self._resolve_model(body)
        questions, plan = await asyncio.to_thread(self._planned, body)
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
                found = await asyncio.to_thread(plan.answer, before_call)
            except Cancelled as error:
                raise HTTPException(503, str(error)) from error
            except FloatingPointError as error:
                raise HTTPException(500, str(error)) from error
        answers = {one.name: one.answer([*found[one.name].probabilities.values()]) for one in questions}
        usage = {"input_tokens": found.input_tokens, "output_tokens": 0}
        return JSONResponse({"model": name, "answers": answers, "usage": usage})

    def _planned(self, body: dict[str, Any]) -> tuple[list[Any], Plan]:
        """transformers' questions, and what is to be read. Raises Refused."""
        try:
            request = SystemOneHandler._validate_request(self, body)
            questions = parse_questions(request.questions, self.decision_config)
        except HTTPException as error:
            found = [error.detail] if isinstance(error.detail, str) else error.detail
            said = "; ".join(f"{_place(item)}: {item['msg']}" for item in found if isinstance(item, Mapping))
            raise Refused((said or str(error.detail))[:LONGEST], error.status_code, _field(found)) from error
        except RecursionError:
            raise Refused("questions are nested too deeply", 422, "questions") from None
        if self.decision_config.chat_template is not None:
            raise Refused(f"this model asks with a {TEMPLATE} of its own, which is not supported here", 400)
        if request.assets:
            raise Refused("assets are images, and this server answers about text; leave them out", 400, "assets")
        temperature = {kind: float(value) for kind, value in self.decision_config.temperature.items() if kind in TYPES}
        model = self.generation_state.engine.model
        try:
            return questions, planned(
                model, request.state, {one.name: asked_of(one) for one in questions}, temperature=temperature
            )
        except (ValueError, TypeError) as error:
            raise Refused(str(error)[:LONGEST], 400) from error


def asked_of(question: Any) -> Asked:
    """A question of transformers', for `planned`."""
    values = tuple(VALUES[option] for option in question.options) if question.type == "noul" else question.options
    values = tuple(range(len(values))) if question.type == "score" else tuple(values)
    told = question.instructions, [*question.options], [*question.labels], [*question.descriptions]
    return Asked(question.type, *told, values)


def config_of(model: Any) -> DecisionConfig:
    """The decision.json in a checkpoint's folder; transformers' defaults where there is none.

    Raises:
        ValueError: a file that cannot be read.
    """
    folder = getattr(model.module, "name_or_path", None)
    if not isinstance(folder, str) or not os.path.isdir(folder):
        return DecisionConfig()
    file, template = Path(folder, SETTINGS), Path(folder, TEMPLATE)
    try:
        found = DecisionConfig.from_file(file if file.is_file() else None)
        found.chat_template = read_text(template) if template.is_file() else None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{SETTINGS} in {folder!r} cannot be read: {shown(str(error))}") from error
    return found


def _place(item: Mapping[str, Any]) -> str:
    return shown(".".join(map(str, item.get("loc", ())[1:])))[1:-1]


def _field(found: Any) -> str | None:
    places = [item.get("loc", ())[1:2] for item in found if isinstance(item, Mapping)]
    return str(places[0][0])[:80] if places and places[0] else None
