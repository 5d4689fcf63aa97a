"""`decide`: typed questions about a state, each answered by the model's probabilities of a few labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from paradec.api.decisions.questions import TYPES, Question, check_json
from paradec.api.decisions.rows import Step, Template, lay_out, read
from paradec.core.checks import check_bool, check_choice, check_int, check_model, check_number, shown
from paradec.core.weights import weights_lock


@dataclass(frozen=True)
class Decision:
    """The answer to one question."""

    type: str
    """Of the question: "noul", "choice", "score" or "span"."""
    value: Any
    """True or False, the likeliest option or text, or the mean of a `Score`'s levels (0, 1, ...)."""
    probabilities: Mapping[Any, float]
    """Of True and False, the options, the levels or the texts."""
    confidence: float
    """0 for a guess, 1 for certainty: (p - 1/m) / (1 - 1/m) of the likeliest of m options; of a `Score` 1 less the mean
    distance to the likeliest level, over that of a uniform guess to the middle; at least 0 (as transformers')."""
    entropy: float
    """Of the probabilities, in nats."""
    mass: float
    """Of all labels together, among all that the model could have written. A low one: it did not understand."""
    log_scores: tuple[float, ...]
    """Of the options, in order: log-probabilities of the labels, less those of the prior, before the temperature."""


@dataclass(frozen=True)
class Decisions(Mapping[str, Decision]):
    """What `decide` returns: a `Decision` for each question, by its name."""

    answers: Mapping[str, Decision]
    forwards: int
    """Calls of the model."""
    input_tokens: int
    """Tokens of the rows that the questions were read from."""

    def __getitem__(self, name: str) -> Decision:
        return self.answers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold; probabilities as pairs, since their keys may be no texts."""
        data = asdict(self)
        for answer in data["answers"].values():
            answer["probabilities"] = [[*pair] for pair in answer["probabilities"].items()]
        return data


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
    before_call: Callable[[int], None] | None = None,
) -> Decisions:
    """Answer questions about a state from the probabilities of their labels, without generating.

    >>> questions = {"spam": paradec.YesNo("Is it spam?")}                 # doctest: +SKIP
    >>> paradec.decide(model, "WIN a FREE phone!", questions)["spam"].value  # doctest: +SKIP
    True

    Each question is a row of its own, in the prompt of transformers' decision pipeline; on causal models the answers
    equal that pipeline's. An answer is read where the model would begin it: from the distribution of the next token, at
    a mask that the end token follows, or from the first step of a canvas with all else given. Labels of several tokens
    are read by the chain rule, each token given those before it; a shorter one is followed by an end token.

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
        template: from the state as text and a question (`paradec.api.decisions.questions.Question`) to what the user's
            turn says, in the place of transformers' prompt.
        seeds: noises that probabilities are means over; of canvases.
        batch_size: rows evaluated together.
        before_call: called before the first and every other call of the model with the number of tokens that all calls
            evaluate; its error ends the reading.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        ImportError: the installed transformers is older than 5.23, and its prompt or special tokens as text are needed.
        FloatingPointError: the model returned NaN or infinite logits, or no label has a probability.
    """
    _check(model, state, questions, together, rotate, template)
    if prior is not None:
        check_choice("prior", prior, ("empty",))
    check_int("seeds", seeds, low=1, high=1024)
    check_int("batch_size", batch_size, low=1)
    value = 1.0 if temperature is None else temperature
    temperatures: Mapping[str, float] = value if isinstance(value, Mapping) else dict.fromkeys(TYPES, value)
    for kind, number in temperatures.items():
        check_choice("type of question in temperature", kind, TYPES)
        check_number("temperature", number, low=1e-6, high=1e6)
    num_turns = {
        name: len(question.values) if rotate and question.type == "choice" else 1
        for name, question in questions.items()
    }
    rows = [{name: questions[name].rotated(by)} for name, turns in num_turns.items() for by in range(turns)]
    input_tokens = 0
    # the ways in which each question is asked: about the state (1) or nothing (-1), and the labels' steps
    phrasings: dict[str, list[tuple[Question, int, list[list[Step]]]]] = {name: [] for name in questions}
    for about, sign in [(state, 1), ("", -1)] if prior else [(state, 1)]:
        for row in [questions] if together else rows:
            length, steps = lay_out(model, about, [*row.values()], template)
            input_tokens += length
            for (name, question), labels in zip(row.items(), steps, strict=True):
                phrasings[name].append((question, sign, labels))
    steps_read = [step for ways in phrasings.values() for *_, labels in ways for step in chain(*labels)]
    with weights_lock(model):
        log_probs, forwards = read(model, steps_read, batch_size, seeds, before_call)
    answers: dict[str, Decision] = {}
    for name, question in questions.items():
        scores, masses = np.zeros(len(question.values)), list[float]()
        for phrasing, sign, labels in phrasings[name]:
            logs = np.array([sum(log_probs[step] for step in label) for label in labels], np.float64)
            if sign > 0:
                masses.append(min(1.0, float(np.exp(logs).sum())))
            elif not np.isfinite(logs).all():
                raise FloatingPointError(f"a label of question {name!r} has no probability about an empty state")
            scores += sign / num_turns[name] * logs[[phrasing.values.index(value) for value in question.values]]
        if not np.isfinite(scores).any():
            raise FloatingPointError(f"no label of question {name!r} has a probability")
        scale = float(temperatures.get(question.type, 1))
        answers[name] = build_decision(question, scores, float(np.mean(masses)), scale)
    return Decisions(answers, forwards, input_tokens)


def _check(
    model: Any, state: Any, questions: Mapping[str, Question], together: bool, rotate: bool, template: Any
) -> None:
    """Raise TypeError or ValueError for what cannot be asked, and for a model that cannot be asked."""
    check_model("decide", model, ("text", "canvas"))
    name, topology, tokenizer = model.facts.name, model.facts.topology, getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer to write questions with: wrap it with tokenizer=...")
    if topology == "causal_context":
        raise ValueError(f"{name} reads the first token as a causal model: load(..., topology='causal')")
    if topology != "causal" and model.facts.hole_id is None:
        raise ValueError(f"{name} has no mask token: {topology!r} models are asked at a mask")
    if not isinstance(questions, Mapping) or not questions:
        raise ValueError(f"questions={shown(questions)} must map names to questions, one at least")
    for key, question in questions.items():
        if not isinstance(key, str) or not isinstance(question, Question):
            pair = f"{{{shown(key)}: {shown(question)}}}"
            raise TypeError(f"questions={pair} must map names to paradec.YesNo, Pick, Score or Span")
    if isinstance(state, (list, tuple)):
        raise ValueError(f"state={shown(state)} must be one text or JSON object: decide each, or give its json.dumps")
    check_json("state", state)
    if not isinstance(state, (str, dict)):
        raise TypeError(f"state={shown(state)} must be a text, or an object of JSON")
    check_bool("rotate", rotate)
    check_bool("together", together)
    if template is not None and not callable(template):
        raise TypeError(f"template={shown(template)} must be a function of the state and a question, or None")
    if together and rotate:
        raise ValueError("rotate=True asks a question several times, and together=True once: give one of them")
    if together and topology not in ("bidirectional", "canvas"):
        raise ValueError(f"together=True needs a model that sees the whole row: {name} is {topology!r}")
    if together and not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"together=True asks in turns of a chat, and {name} has no chat template")


def build_decision(question: Question, log_scores: np.ndarray, mass: float, temperature: float) -> Decision:
    """The decision of a question, from log scores [m] of its options."""
    p = _softmax(log_scores / temperature)
    count, best = len(p), int(p.argmax())
    is_score, levels = question.type == "score", np.arange(count)
    if count == 1:
        confidence = 1.0
    elif is_score:
        confidence = 1 - float(p @ np.abs(levels - best)) / (float(np.abs(levels - (count - 1) / 2).sum()) / count)
    else:
        confidence = (float(p[best]) - 1 / count) / (1 - 1 / count)
    return Decision(
        type=question.type,
        value=float(p @ levels) if is_score else question.values[best],
        probabilities=dict(zip(question.values, p.tolist(), strict=True)),
        confidence=max(0.0, confidence),
        entropy=max(0.0, -float(p[p > 0] @ np.log(p[p > 0]))),
        mass=mass,
        log_scores=tuple(log_scores.tolist()),
    )


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities [m] proportional to exp(scores); one score at least is finite."""
    weights: np.ndarray = np.exp(scores - scores.max())
    return weights / weights.sum()


def fit_temperature(decided: Sequence[Mapping[str, Decision]], right: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The temperature of each type of question under which right answers are likeliest, for `temperature` of `decide`.

    The mean of -log p(right answer) is convex in 1 / temperature; its minimum is found by bisection, between 0.001 and
    1000 (which is the result where answers are all right, or no better than a guess). Fit it on questions whose answers
    are known, and use it on others.

    Args:
        decided: results of `decide`, whatever their temperature.
        right: for each of them the right answers by name: True or False, an option, a level (0, 1, ...) or a text.
            Questions that are not named are left out.

    Raises:
        ValueError: nothing to fit, or an answer that is none of a question's; the message names it.
    """
    if len(decided) != len(right):
        raise ValueError(f"{len(decided)} results and {len(right)} mappings of right answers: give one for each")
    cases: dict[str, list[tuple[np.ndarray, int]]] = {}
    for answers, known in zip(decided, right, strict=True):
        for name, value in known.items():
            if name not in answers:
                raise ValueError(f"right answer to {name!r}, which was not asked; asked: {shown([*answers])}")
            options = [*answers[name].probabilities]
            if not any(type(value) is type(option) and value == option for option in options):
                raise ValueError(f"right answer {shown(value)} to {name!r} is none of {shown(options)}")
            scores = np.array(answers[name].log_scores)
            cases.setdefault(answers[name].type, []).append((scores - scores.max(), options.index(value)))
    if not cases:
        raise ValueError("no right answers: give one at least")
    return {kind: _fit(scores) for kind, scores in cases.items()}


def _fit(cases: Sequence[tuple[np.ndarray, int]]) -> float:
    """Bisect for the temperature at which expected scores equal those of right answers: the mean of -log p is least."""
    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(100):
        middle, excess = (low + high) / 2, 0.0
        for scores, right in cases:
            weights = _softmax(scores / math.exp(middle))
            seen = weights > 0
            excess += float(weights[seen] @ scores[seen]) - float(scores[right])
        low, high = (middle, high) if excess > 0 else (low, middle)  # > 0: the distribution is too sharp
    return math.exp((low + high) / 2)
