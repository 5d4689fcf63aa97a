"""From log-probabilities of labels to decisions, and the temperature that makes their probabilities fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paradec.api.decisions.questions import Asked
from paradec.core.checks import shown

RANGE = (1e-3, 1e3)
"""Of the temperatures that are fitted."""


@dataclass(frozen=True)
class Decision:
    """The answer to one question."""

    type: str
    """Of the question: "noul", "choice", "score" or "span"."""
    value: Any
    """Of a `YesNo` True or False, of a `Pick` or `Span` the likeliest option, of a `Score` the mean of the levels
    (0, 1, ...) by their probabilities."""
    probabilities: Mapping[Any, float]
    """Of True and False, the options, the levels or the texts."""
    confidence: float
    """0 where the answer is as good as a guess, 1 where it is certain: (p - 1/m) / (1 - 1/m) of the likeliest of m
    options; of a `Score` 1 less the mean distance to the likeliest level, over that of a uniform guess to the middle;
    at least 0 (transformers' definitions)."""
    entropy: float
    """Of the probabilities, in nats."""
    mass: float
    """The probability of all labels together among everything that the model could have written. Where it is low the
    model did not understand what may be answered."""
    log_scores: tuple[float, ...]
    """Of the options, in order: the logarithms of the labels' probabilities, less those of the prior; before the
    temperature."""


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
        return {
            "answers": {
                name: asdict(answer) | {"probabilities": [[*pair] for pair in answer.probabilities.items()]}
                for name, answer in self.answers.items()
            },
            "forwards": self.forwards,
            "input_tokens": self.input_tokens,
        }


def decided(asked: Asked, log_scores: Sequence[float], mass: float, temperature: float) -> Decision:
    """The decision that log scores [m] of a question's options come to."""
    probabilities = softmax(np.asarray(log_scores, np.float64) / temperature)
    count, best = len(probabilities), int(probabilities.argmax())
    if asked.type == "score":
        value: Any = float(probabilities @ np.arange(count))
        distance = float(probabilities @ np.abs(np.arange(count) - best))
        guess = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
        confidence = 1.0 if count == 1 else max(0.0, 1 - distance / guess)
    else:
        value = asked.values[best]
        confidence = 1.0 if count == 1 else max(0.0, (float(probabilities[best]) - 1 / count) / (1 - 1 / count))
    found = probabilities[probabilities > 0]
    return Decision(
        type=asked.type,
        value=value,
        probabilities=dict(zip(asked.values, probabilities.tolist(), strict=True)),
        confidence=confidence,
        entropy=max(0.0, -float(found @ np.log(found))),
        mass=mass,
        log_scores=tuple(map(float, log_scores)),
    )


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities [m] that are proportional to exp(scores), of which one at least is finite."""
    weights = np.exp(scores - scores.max())
    found: np.ndarray = weights / weights.sum()
    return found


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
    found: dict[str, list[tuple[np.ndarray, int]]] = {}
    for answers, known in zip(decided, right, strict=True):
        for name, value in known.items():
            if name not in answers:
                raise ValueError(f"right answer to {name!r}, which was not asked; asked: {shown([*answers])}")
            decision = answers[name]
            options = [*decision.probabilities]
            if not any(type(value) is type(option) and value == option for option in options):
                raise ValueError(f"right answer {shown(value)} to {name!r} is none of {shown(options)}")
            scores = np.array(decision.log_scores)
            found.setdefault(decision.type, []).append((scores - scores.max(), options.index(value)))
    if not found:
        raise ValueError("no right answers: give one at least")
    return {kind: _fitted(cases) for kind, cases in found.items()}


def _fitted(cases: list[tuple[np.ndarray, int]]) -> float:
    def slope(temperature: float) -> float:
        """Of the mean of -log p by 1 / temperature: how far expected scores are above those of right answers."""
        total = 0.0
        for scores, at in cases:
            weights = softmax(scores / temperature)
            seen = weights > 0
            total += float(weights[seen] @ scores[seen]) - float(scores[at])
        return total

    low, high = map(math.log, RANGE)
    for _ in range(100):
        middle = (low + high) / 2
        # where expected scores are too high the distribution is too sharp
        low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
    return math.exp((low + high) / 2)
