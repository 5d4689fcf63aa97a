"""/v1/systemone: typed questions about a state, in the format of transformers' server (`paradec.decide`)."""

from __future__ import annotations

import asyncio
import json
import os
import string
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paradec.api.decisions.decide import Decision, decide
from paradec.api.decisions.questions import TYPES, Question, check_json
from paradec.batching.slots import Cancelled
from paradec.core.checks import shown
from paradec.core.text_files import read_json
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.limits import ApiError, Call, to_api_error


def _check_content(value: Any) -> Any:
    if not isinstance(value, str | dict | list):
        raise ValueError("must be a text, an object or a list")
    return value


Content = Annotated[Any, AfterValidator(_check_content)]


class Asked(BaseModel):
    """A question of a body."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["noul", "choice", "score"]
    instructions: Content | None = None
    criteria: dict[str, Content | None] | Annotated[list[Content], Field(min_length=1)] | None = None


class DecisionBody(BaseModel):
    """A body for /v1/systemone."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Any = None
    state: Content
    questions: Annotated[dict[str, Asked], Field(min_length=1, max_length=64)]
    assets: dict[str, Any] = {}


class DecisionConfig(BaseModel):
    """The settings of a checkpoint, its decision.json."""

    labels: dict[str, list[str]] = {}
    temperature: dict[str, float] = {}
    noul_options: list[Literal["true", "false"]] = ["true", "false"]
    chat_template: str | None = None

    @classmethod
    def from_model(cls, model: Any) -> DecisionConfig:
        """Read the file in a model's folder; the defaults without one. Raises ValueError for a malformed file."""
        folder = getattr(model.module, "name_or_path", None)
        if not isinstance(folder, str) or not os.path.isdir(folder):
            return cls()
        file = Path(folder, "decision.json")
        try:
            config = cls.model_validate(read_json(file) if file.exists() else {})
        except (OSError, ValueError) as error:
            raise ValueError(f"decision.json in {folder!r} cannot be read: {shown(str(error))}") from error
        if Path(folder, "decision_template.jinja").exists():
            config.chat_template = "decision_template.jinja"
        return config

    def question(self, name: str, asked: Asked) -> Question:
        """Build a question for `paradec.decide`. Raises ApiError for criteria of another type."""
        criteria: Any = {} if asked.criteria is None and asked.type == "noul" else asked.criteria
        values: tuple[Any, ...] = tuple(option == "true" for option in self.noul_options)
        labels = self.labels.get(asked.type) or (["Yes", "No"] if asked.type == "noul" else [*string.ascii_uppercase])
        path = f"questions.{shown(name)[1:-1]}.criteria={shown(criteria)}"
        if asked.type == "noul" and isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}:
            told = [criteria.get(option) for option in self.noul_options]
        elif asked.type == "choice" and criteria and isinstance(criteria, dict):
            told, values = [*criteria.values()], tuple(criteria)
        elif asked.type == "score" and isinstance(criteria, list):
            told, values = criteria, tuple(range(len(criteria)))
        else:
            allowed = "noul: an object with true and false; choice: one with an option at least; score: a list"
            raise ApiError(f"{path} must be for {allowed}", 422, "questions")
        if len(labels) < len(values):
            raise ApiError(f"{path}: this model reads at most {len(labels)} options", 422, "questions")
        return Question(asked.type, asked.instructions, labels[: len(values)], told, values)


def to_answer(question: Question, decision: Decision) -> dict[str, Any]:
    """Write a decision as transformers' server does."""
    if question.type == "noul":
        return {"type": "noul", "noul": decision.probabilities[True]}
    answer: dict[str, Any] = {"type": question.type, question.type: decision.value}
    answer |= {"legend": dict(zip(question.options, question.descriptions))} if question.type == "score" else {}
    probabilities = {str(option): p for option, p in decision.probabilities.items()}
    return answer | {"confidence": decision.confidence, "probabilities": probabilities}


class Decisions:
    """Answers bodies with questions, one at a time. Raises ValueError for a decision.json that cannot be read."""

    def __init__(self, engine: Engine):
        self.engine, self.config, self._turn = engine, DecisionConfig.from_model(engine.model), asyncio.Lock()

    async def answer(self, call: Call, body: DecisionBody) -> dict[str, Any]:
        """Answer the questions of a body until the client leaves. Raises ApiError."""
        if self.config.chat_template is not None:
            raise ApiError("this model asks with its own decision_template.jinja, which is not supported here")
        if body.assets:
            raise ApiError("assets are images, and this server answers about text; leave them out", 400, "assets")
        temperature = {kind: value for kind, value in self.config.temperature.items() if kind in TYPES}
        has_room = False

        def before_call(tokens: int) -> None:
            nonlocal has_room
            if call.has_ended:
                raise Cancelled("the client has left")
            if not has_room:
                call.reserve(tokens)
            has_room = True

        try:
            self.engine.check_alive()
            check_json("state", body.state)
            questions = {name: self.config.question(name, asked) for name, asked in body.questions.items()}
            state = json.dumps(body.state, ensure_ascii=False) if isinstance(body.state, list) else body.state
            ask = partial(decide, self.engine.model, state, questions, temperature=temperature, before_call=before_call)
            async with self._turn:  # several together would share the machine's memory
                decisions = await asyncio.to_thread(ask)
        except ImportError as error:
            raise ApiError(str(error), 501) from error
        except (ValueError, TypeError, RuntimeError, FloatingPointError, Cancelled) as error:
            raise to_api_error(error) from error
        answers = {name: to_answer(question, decisions[name]) for name, question in questions.items()}
        return {"answers": answers, "usage": {"input_tokens": decisions.input_tokens, "output_tokens": 0}}
