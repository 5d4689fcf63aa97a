"""/v1/systemone: typed questions about a state, in the format of transformers' server (`paradec.decide`)."""

from __future__ import annotations

import asyncio
import os
import string
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paradec.api.decisions.decide import Decision, Plan
from paradec.api.decisions.questions import TYPES, Question
from paradec.batching.slots import Cancelled
from paradec.core.checks import shown
from paradec.core.text_files import read_json
from paradec.integrations.server.engine import Engine
from paradec.integrations.server.errors import ApiError, to_api_error
from paradec.integrations.server.limits import Call


def _check_content(value: Any) -> Any:
    if not isinstance(value, str | dict | list):
        raise ValueError("must be a text, an object or a list")
    return value


Content = Annotated[Any, AfterValidator(_check_content)]


class Strict(BaseModel):
    """A part of a body."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Noul(Strict):
    """Whether something is true."""

    type: Literal["noul"]
    instructions: Content | None = None
    criteria: dict[Literal["true", "false"], Content | None] | None = None


class Choice(Strict):
    """One of several options."""

    type: Literal["choice"]
    instructions: Content | None = None
    criteria: Annotated[dict[str, Content | None], Field(min_length=1)]


class Score(Strict):
    """A level, lowest first."""

    type: Literal["score"]
    instructions: Content | None = None
    criteria: Annotated[list[Content], Field(min_length=1)]


class DecisionBody(Strict):
    """A body for /v1/systemone."""

    model: Any = None
    state: Content
    questions: Annotated[
        dict[str, Annotated[Noul | Choice | Score, Field(discriminator="type")]], Field(min_length=1, max_length=64)
    ]
    assets: dict[str, Any] = {}


class DecisionConfig(BaseModel):
    """The settings of a checkpoint, its decision.json."""

    labels: dict[str, list[str]] = {}
    temperature: dict[str, float] = {}
    noul_options: tuple[Literal["true", "false"], Literal["true", "false"]] = ("true", "false")
    chat_template: str | None = None

    @classmethod
    def from_model(cls, model: Any) -> DecisionConfig:
        """Read the file in a model's folder; the defaults without one. Raises ValueError for a malformed file."""
        folder = getattr(model.module, "name_or_path", None)
        place = Path(folder) if isinstance(folder, str) and os.path.isdir(folder) else None
        try:
            config = (
                cls()
                if place is None or not (place / "decision.json").exists()
                else cls.model_validate(read_json(place / "decision.json"))
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"decision.json in {folder!r} cannot be read: {shown(str(error))}") from error
        if place is not None and (place / "decision_template.jinja").exists():
            config.chat_template = "decision_template.jinja"
        return config

    def question(self, asked: Noul | Choice | Score) -> Question:
        """Build a question for `paradec.decide`. Raises ApiError for more options than there are labels."""
        if isinstance(asked, Noul):
            told = [(asked.criteria or {}).get(option) for option in self.noul_options]
            values: tuple[Any, ...] = tuple(option == "true" for option in self.noul_options)
        elif isinstance(asked, Choice):
            told, values = [*asked.criteria.values()], tuple(asked.criteria)
        else:
            told, values = asked.criteria, tuple(range(len(asked.criteria)))
        default = ["Yes", "No"] if asked.type == "noul" else [*string.ascii_uppercase]
        labels = self.labels.get(asked.type) or default
        if len(labels) < len(values):
            raise ApiError(f"questions: this model reads at most {len(labels)} options", 422, "questions")
        return Question(asked.type, asked.instructions, labels[: len(values)], told, values)


def to_answer(question: Question, decision: Decision) -> dict[str, Any]:
    """Write a decision as transformers' server does."""
    if question.type == "noul":
        return {"type": "noul", "noul": decision.probabilities[True]}
    answer: dict[str, Any] = {"type": question.type, question.type: decision.value}
    if question.type == "score":
        answer["legend"] = dict(zip(question.options, question.descriptions, strict=True))
    probabilities = {str(option): p for option, p in decision.probabilities.items()}
    return answer | {"confidence": decision.confidence, "probabilities": probabilities}


class Decisions:
    """Answers bodies with questions. Raises ValueError for a decision.json that cannot be read."""

    def __init__(self, engine: Engine):
        self.engine, self.config = engine, DecisionConfig.from_model(engine.model)
        self._turn = asyncio.Lock()  # one body at a time, so that several do not share the machine's memory

    async def answer(self, call: Call, body: DecisionBody) -> dict[str, Any]:
        """Answer the questions of a body; ends when the client leaves. Raises ApiError."""
        if self.config.chat_template is not None:
            raise ApiError("this model asks with its own decision_template.jinja, which is not supported here")
        if body.assets:
            raise ApiError("assets are images, and this server answers about text; leave them out", 400, "assets")
        questions = {name: self.config.question(asked) for name, asked in body.questions.items()}
        temperature = {kind: value for kind, value in self.config.temperature.items() if kind in TYPES}

        def check_call() -> None:
            if call.ended:
                raise Cancelled("the client has left")

        try:
            plan = await asyncio.to_thread(Plan, self.engine.model, body.state, questions, temperature=temperature)
            self.engine.check_alive()
            call.reserve(plan.evaluated)
            async with self._turn:
                decisions = await asyncio.to_thread(plan.answer, check_call)
        except ImportError as error:
            raise ApiError(str(error), 501) from error
        except (ValueError, TypeError, RuntimeError, FloatingPointError, Cancelled) as error:
            raise to_api_error(error) from error
        answers = {name: to_answer(question, decisions[name]) for name, question in questions.items()}
        return {"answers": answers, "usage": {"input_tokens": decisions.input_tokens, "output_tokens": 0}}
