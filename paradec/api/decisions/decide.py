"""`decide`: typed questions about a state, each answered by the model's probabilities of a few labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.api.decisions.answers import Decision, Decisions, decided
from paradec.api.decisions.prompts import Place, Template, places
from paradec.api.decisions.questions import Asked, Pick, Question, Score, Span, YesNo, check_json
from paradec.api.decisions.reading import Reading, Row
from paradec.core.checks import check_bool, check_choice, check_int, check_model, check_number, shown
from paradec.core.prompts import check_rows
from paradec.core.registry import unknown
from paradec.models.requests import UNSHARED

MADE = ("text", "canvas")
"""Kinds of model (`paradec.core.checks.MODELS`) that can be asked."""
PRIORS = ("empty",)
TYPES = tuple(kind.type for kind in (YesNo, Pick, Score, Span))
MOST_SEEDS = 1024


def decide(
    model: Any,
    state: Any,
    questions: Mapping[str, Question],
    *,
    together: bool = False,
    temperature: float | Mapping[str, float] | None = None,
    prior: str | None = None,
    rotate: bool = False,
    template: Template | None = None,
    seeds: int = 4,
    batch_size: int = 16,
) -> Decisions:
    """Answer questions about a state from the probabilities of their labels, without generating.

    >>> questions = {"spam": paradec.YesNo("Is it spam?")}                 # doctest: +SKIP
    >>> paradec.decide(model, "WIN a FREE phone!", questions)["spam"].value  # doctest: +SKIP
    True

    Each question is a row of its own, so that its answer depends on no other question. The prompt is that of
    transformers' decision pipeline (the System One prompt); on causal models the answers equal that pipeline's. The
    answer is read where the model would begin it: on causal models from the distribution of the next token, on masked
    ones at a mask that the end token follows, on canvases of noise from the first step, in which everything but the
    answer and what follows it is given. Labels of several tokens are read by the chain rule, each token given those
    before it; a shorter one is followed by an end token.

    Args:
        model: from `paradec.load` or `paradec.wrap`, with a tokenizer; of masked models those that are bidirectional or
            block-causal.
        state: what is asked about: a text, or an object of JSON; one state, no list of them.
        questions: `YesNo`, `Pick`, `Score` or `Span` by name.
        together: ask all questions in one row, as turns of one chat. It takes less time, and each answer then depends
            on the texts of all questions. For bidirectional models and canvases.
        temperature: that log scores are divided by; or one for each type ("noul", "choice", "score", "span"), as
            `fit_temperature` gives them. None is 1.
        prior: "empty" subtracts the log scores of the same questions about an empty state ("Calibrate Before Use", Zhao
            et al., arXiv 2102.09690), so that a label is not preferred for itself.
        rotate: ask each `Pick` once with every rotation of its options, and take the mean of an option's log scores:
            no label is preferred for its place.
        template: from the state as text and a question (`paradec.api.decisions.questions.Asked`) to what the user's
            turn says, in the place of transformers' prompt.
        seeds: noises that probabilities are means over; of canvases.
        batch_size: rows evaluated together.

    Returns:
        `Decisions`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        ImportError: the installed transformers has no prompt for questions, and `template` is not given.
        FloatingPointError: the model returned NaN or infinite logits, or no label has a probability.
    """
    if isinstance(state, (list, tuple)):
        raise ValueError(
            f"state={shown(state)} must be one text or JSON object: call decide once for each state, or give "
            "json.dumps of a list that is one state"
        )
    if not isinstance(questions, Mapping) or not questions:
        raise ValueError(f"questions={shown(questions)} must map names to questions, one at least")
    asked = {}
    for name, question in questions.items():
        if not isinstance(name, str) or not isinstance(question, Question):
            raise TypeError(
                f"questions={shown(questions)} must map names to paradec.YesNo, Pick, Score or Span; {shown(name)} is "
                f"{shown(question)}"
            )
        asked[name] = question.asked()
    check_bool("rotate", rotate)
    named: dict[str, Any] = {"together": together, "temperature": temperature, "prior": prior, "seeds": seeds}
    return planned(model, state, asked, rotate=rotate, template=template, batch_size=batch_size, **named).answer()


@dataclass(frozen=True)
class Part:
    """One way in which a question is asked."""

    asked: Asked
    place: Place
    weight: float
    """Of its log scores: those of an empty state are subtracted."""


@dataclass(frozen=True)
class Plan:
    """What will be read of a model, all of it checked."""

    model: Any
    parts: Mapping[str, list[Part]]
    asked: Mapping[str, Asked]
    temperature: Mapping[str, float]
    seeds: int
    batch_size: int

    @property
    def input_tokens(self) -> int:
        """Tokens of the rows that the questions are asked in."""
        return sum(
            map(len, {id(part.place.row): part.place.row for own in self.parts.values() for part in own}.values())
        )

    @property
    def evaluated(self) -> int:
        """Tokens of all rows that are evaluated, a row for each beginning of a label."""
        reading = Reading()
        for part in self._every():
            _want(reading, self.model, part.place)
        copies = self.seeds if self.model.facts.topology == "canvas" else 1
        return sum(map(len, reading.wanted)) * copies

    def answer(self, before_call: Callable[[], None] | None = None) -> Decisions:
        """Evaluate the rows. before_call: called before every call of the model; what it raises ends the reading.

        Raises:
            FloatingPointError: as `decide`.
        """
        reading = Reading()
        for part in self._every():
            _want(reading, self.model, part.place)
        with getattr(self.model, "requests", UNSHARED).slot.lock:
            reading.read(self.model, self.batch_size, self.seeds, before_call)
        answers = {name: self._answer(name, reading) for name in self.parts}
        return Decisions(answers, reading.forwards, self.input_tokens)

    def _every(self) -> list[Part]:
        return [part for own in self.parts.values() for part in own]

    def _answer(self, name: str, reading: Reading) -> Decision:
        asked = self.asked[name]
        scores, masses = np.zeros(len(asked.values)), []
        for part in self.parts[name]:
            said = np.array([_log_probability(reading, self.model, part.place, text) for text in part.place.texts])
            if not np.isfinite(said).any():
                raise FloatingPointError(f"no label of question {name!r} has a probability")
            if part.weight > 0:
                masses.append(min(1.0, float(np.exp(said).sum())))
            elif not np.isfinite(said).all():
                raise FloatingPointError(f"a label of question {name!r} has no probability about an empty state")
            order = [part.asked.values.index(value) for value in asked.values]
            scores += part.weight * said[order]
        if not np.isfinite(scores).any():
            raise FloatingPointError(f"no label of question {name!r} has a probability in every order")
        return decided(asked, scores.tolist(), float(np.mean(masses)), self.temperature[asked.type])


def planned(
    model: Any,
    state: Any,
    asked: Mapping[str, Asked],
    *,
    together: bool = False,
    temperature: float | Mapping[str, float] | None = None,
    prior: str | None = None,
    rotate: bool = False,
    template: Template | None = None,
    seeds: int = 4,
    batch_size: int = 16,
) -> Plan:
    """Check everything, and lay out the rows; as `decide`, for questions as templates read them."""
    _check_model(model, together)
    check_json("state", state)
    if not isinstance(state, (str, dict, list, tuple)):
        raise TypeError(f"state={shown(state)} must be a text, or an object or a list of JSON")
    check_bool("together", together)
    if prior is not None:
        check_choice("prior", prior, PRIORS)
    check_int("seeds", seeds, low=1, high=MOST_SEEDS)
    check_int("batch_size", batch_size, low=1)
    if template is not None and not callable(template):
        raise TypeError(f"template={shown(template)} must be a function of the state and a question, or None")
    temperatures = _temperatures(temperature)
    if together and rotate:
        raise ValueError("rotate=True asks a question several times, and together=True once: give one of them")
    ways = [(state, 1.0), ("", -1.0)] if prior else [(state, 1.0)]
    parts: dict[str, list[Part]] = {name: [] for name in asked}
    for about, sign in ways:
        if together:
            found = places(model, about, [*asked.values()], template, True)
            for (name, one), place in zip(asked.items(), found, strict=True):
                parts[name].append(Part(one, _checked(model, place), sign))
            continue
        for name, one in asked.items():
            turns = len(one.values) if rotate and one.type == Pick.type else 1
            rotated = [one.rotated(by) for by in range(turns)] if turns > 1 else [one]
            for each, place in zip(rotated, places(model, about, rotated, template, False), strict=True):
                parts[name].append(Part(each, _checked(model, place), sign / turns))
    return Plan(model, parts, asked, temperatures, seeds, batch_size)


def _checked(model: Any, place: Place) -> Place:
    """Raises ValueError for a row that the model cannot take."""
    facts, beyond = model.facts, len(place.row) - place.prompt
    if place.holes == 0:  # the row grows by what is given of a label
        beyond = max(map(len, place.texts))
    elif facts.topology == "canvas":
        if beyond > facts.block_length:
            raise ValueError(
                f"the answers take {beyond} positions after the prompt, and a canvas has {facts.block_length}"
            )
        beyond = facts.block_length
    check_rows(model, [[*place.row]])
    facts.check_length(place.prompt + beyond, beyond)
    return place


def _check_model(model: Any, together: bool) -> None:
    """Raise TypeError or ValueError for a model that cannot be asked."""
    check_model("decide", model, MADE)
    facts = model.facts
    if getattr(model, "tokenizer", None) is None:
        raise ValueError(f"{facts.name} has no tokenizer, which questions are written with: wrap it with tokenizer=...")
    if facts.topology == "causal_context":
        raise ValueError(
            f"{facts.name} reads the first token of an answer as a causal model: load(..., topology='causal')"
        )
    if facts.topology != "causal" and facts.hole_id is None:
        raise ValueError(f"{facts.name} has no mask token: {facts.topology!r} models are asked at a mask")
    if together is True and facts.topology not in ("bidirectional", "canvas"):
        raise ValueError(
            f"together=True needs a model that sees the whole row: {facts.name} is {facts.topology!r}, and would read "
            "a question after answers that are not there"
        )


def _temperatures(given: Any) -> dict[str, float]:
    """One for each type."""
    values = {} if given is None else given if isinstance(given, Mapping) else dict.fromkeys(TYPES, given)
    for name, value in values.items():
        if name not in TYPES:
            raise ValueError(unknown("type of question in temperature", name, TYPES))
        check_number("temperature", value, low=0, high=1e6, open_low=True)
        if value < 1e-6:
            raise ValueError(f"temperature={shown(value)} must be a number in [1e-06, 1e+06]")
    return {name: float(values.get(name, 1.0)) for name in TYPES}


# ---- labels of several tokens ---------------------------------------------------------------------------------------


def _steps(model: Any, place: Place, text: tuple[int, ...]) -> list[tuple[Row, int, tuple[int, ...]]]:
    """What a label's probability is the product of: rows, positions in them, and the ids that may be there."""
    found: list[tuple[Row, int, tuple[int, ...]]] = []
    follows = [(token,) for token in text]
    if place.closed and len(text) != place.holes:
        follows.append(tuple(model.facts.eos_token_ids))
    for count, ids in enumerate(follows):
        row = place.row[: place.at] + text[:count] + place.row[place.at + count :]
        found.append((row, place.at + count, ids))
    return found


def _want(reading: Reading, model: Any, place: Place) -> None:
    for text in place.texts:
        for row, at, ids in _steps(model, place, text):
            reading.want(row, at, ids, place.prompt)


def _log_probability(reading: Reading, model: Any, place: Place, text: tuple[int, ...]) -> float:
    total = 0.0
    for row, at, ids in _steps(model, place, text):
        said = [reading.found[row, at][token] for token in ids]
        most = max(said)
        total += most if most == -math.inf else most + math.log(sum(math.exp(value - most) for value in said))
    return total
