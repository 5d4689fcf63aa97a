"""/v1/systemone: typed questions about a state, in the format of transformers' server (`paradec.decide`)."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, Field

from paradec.api.decide import TYPES, Question, check_json, decide, import_decision
from paradec.batching.slots import Cancelled
from paradec.core.checks import shown
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import ApiError, Call


class DecisionBody(BaseModel, extra="forbid", strict=True):
    """A body for /v1/systemone; transformers checks its questions."""

    model: Any = None
    state: Any
    questions: Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=64)]
    assets: dict[str, Any] = {}


def build_question(parsed: Any) -> Question:
    """Build a question for `paradec.decide` from transformers'."""
    values = {"noul": [option == "true" for option in parsed.options], "choice": parsed.options}
    options = tuple(values.get(parsed.type, range(len(parsed.options))))
    return Question(parsed.type, parsed.instructions, parsed.labels, parsed.descriptions, options)


class Decisions:
    """Answers bodies with questions, one at a time. Raises ValueError for a malformed decision.json."""

    def __init__(self, engine: Engine):
        self.model, self._turn, self.config = engine.model, asyncio.Lock(), None
        folder = getattr(self.model.module, "name_or_path", None)
        folder = folder if isinstance(folder, str) and os.path.isdir(folder) else ""
        try:
            self.config: Any = import_decision().DecisionConfig.from_pretrained(folder)
        except ImportError:  # `answer` says so
            pass
        except Exception as error:  # of any kind: the file can hold anything
            raise ValueError(f"decision.json in {folder!r} cannot be read: {shown(str(error))}") from error

    async def answer(self, call: Call, body: DecisionBody) -> dict[str, Any]:
        """Answer the questions of a body until the client leaves. Raises what `to_api_error` converts."""
        if not isinstance(body.state, str | dict | list):
            raise ApiError(f"state={shown(body.state)} must be a text, an object or a list", 422, "state")
        if body.assets:
            raise ApiError("assets are images, and this server answers about text; leave them out", 400, "assets")

        def before_call(tokens: int) -> None:
            if call.has_ended:
                raise Cancelled("the client has left")
            if not call.num_reserved:  # the first call of several reserves for all
                call.reserve(tokens)

        check_json("state", body.state)
        check_json("questions", body.questions)
        try:
            parsed = import_decision().parse_questions(body.questions, self.config)
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(f"questions: {error}", 422, "questions") from error
        if self.config.chat_template is not None:
            raise ApiError("this model asks with its own decision_template.jinja, which is not supported here")
        questions = {question.name: build_question(question) for question in parsed}
        state = json.dumps(body.state, ensure_ascii=False) if isinstance(body.state, list) else body.state
        temperature = {kind: value for kind, value in self.config.temperature.items() if kind in TYPES}
        ask = partial(decide, self.model, state, questions, temperature=temperature, before_call=before_call)
        async with self._turn:  # several together would share the machine's memory
            decisions = await asyncio.to_thread(ask)
        answers = {
            question.name: question.answer([*decisions[question.name].probabilities.values()]) for question in parsed
        }
        return {"answers": answers, "usage": {"input_tokens": decisions.input_tokens, "output_tokens": 0}}
