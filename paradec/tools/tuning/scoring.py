"""Scores of answers, and costs of decoding. In this file, the reference is decoding with one token per step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paradec.api.generate import decode_request, make_sampler
from paradec.core.checks import check_choice, short_repr
from paradec.core.prompts import Prompts, encode
from paradec.request import Request
from paradec.tools.evaluation.questions import Question

SCORES = ("answers", "checker", "agreement")
Checker = Callable[[Any, Any], float]
"""`checker(prompt, answer)` scores an answer from 0 to 1. The answer is a text, or ids if there is no tokenizer."""


@dataclass(frozen=True)
class Scorer:
    """Scorer of answers; settings are chosen by its scores. kind: "answers" (known answers), "checker" (the caller's
    function), or "agreement" (with the reference)."""

    kind: str
    checker: Checker | None = None

    @classmethod
    def from_questions(cls, questions: Sequence[Question], kind: str | None, checker: Checker | None) -> Scorer:
        """Build a scorer. The kind None is "checker" if there is a checker, else "answers" if all questions have
        answers, else "agreement". Raises ValueError: an unknown kind, a missing checker or answer, or a checker for
        another kind; TypeError: a checker that is not callable."""
        if checker is not None and not callable(checker):
            raise TypeError(f"checker={short_repr(checker)} must be callable: checker(prompt, answer)")
        missing = sum(not entry.judged for entry in questions)
        if kind is None:
            kind = "checker" if checker is not None else "agreement" if missing else "answers"
        check_choice("score", kind, SCORES)
        if kind == "checker" and checker is None:
            raise ValueError("score='checker' needs checker=: a function of prompt and answer")
        if kind != "checker" and checker is not None:
            raise ValueError(f"score={kind!r} uses no checker: give only one of them")
        if kind == "answers" and missing:
            raise ValueError(
                f"score='answers' needs an answer to every prompt; {missing} of {len(questions)} have none"
            )
        return cls(kind, checker)

    def score(
        self, question: Question, tokens: Sequence[int], text: str | None, reference: Sequence[int] | None
    ) -> float:
        """Score an answer, from 0 to 1.

        tokens: ids of the filled positions, in order, up to the end token.
        text: the answer without special tokens; None without a tokenizer. reference: the ids of the reference's answer.
        Raises ValueError: the checker returned a value outside [0, 1]."""
        if self.kind == "agreement":
            return agreement(tokens, reference or ())
        if self.kind == "answers":
            value = score_by_truth(question, tokens, text)
            assert value is not None  # `from_questions` has checked it
            return value
        assert self.checker is not None
        returned = self.checker(question.prompt, list(tokens) if text is None else text)
        try:
            score = float(returned)
        except (TypeError, ValueError):
            score = -1.0
        if not 0 <= score <= 1:
            raise ValueError(
                f"checker returned {short_repr(returned)} for {short_repr(question.prompt)}; it must be from 0 to 1"
            )
        return score


def score_by_truth(question: Question, tokens: Sequence[int], text: str | None) -> float | None:
    """Score an answer by the known answer, from 0 to 1; None if the question has no known answer."""
    if question.truth is not None:
        return agreement(tokens, question.truth)
    if question.right is None:
        return None
    if text is None:
        raise ValueError("text answers need a model with a tokenizer; give answers as ids")
    return float(question.right(text))


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Compute the share of positions with equal ids, among the positions of the longer sequence."""
    longest = max(len(tokens), len(reference))
    equal = sum(a == b for a, b in zip(tokens, reference))
    return equal / longest if longest else 1.0


FAILURES = (ValueError, FloatingPointError, RuntimeError, NotImplementedError)
"""Errors of decoding after which a setting counts as failed. (Running out of memory raises a RuntimeError.)"""


class DecodingFailed(Exception):
    """Error: decoding with a setting has failed. The message has the reason."""


@dataclass
class Measured:
    """Measurements of a setting. Each list has one entry per prompt, in the order of the half."""

    score: list[float] = field(default_factory=list)
    """Score by the `Scorer`, from 0 to 1."""
    truth: list[float | None] = field(default_factory=list)
    """Score by the known answer, from 0 to 1; None if it is unknown."""
    forwards: list[int] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    """Number of evaluated positions, without padding; a batch's total is divided evenly among its rows."""
    seconds: list[float] = field(default_factory=list)
    """Wall time of decoding; a batch's total is divided evenly among its rows."""

    def __len__(self) -> int:
        return len(self.score)

    def add(self, other: Measured) -> None:
        """Append the measurements of the next prompts."""
        for entry in fields(self):
            getattr(self, entry.name).extend(getattr(other, entry.name))

    def mean(self, name: str) -> float:
        """Compute the mean of the list `name`. Entries that are None are left out."""
        values = [value for value in getattr(self, name) if value is not None]
        return sum(values) / len(values)

    def point(self, costs: Sequence[str]) -> tuple[float, ...]:
        """Return the objectives: the mean score, followed by the mean costs."""
        return (self.mean("score"), *(self.mean(cost) for cost in costs))


class PromptHalf:
    """The prompts of the choosing or the reported half, encoded once."""

    def __init__(self, name: str, model: Any, questions: Sequence[Question], chat: bool | None, mask: str | None):
        self.name, self.model, self.questions = name, model, list(questions)
        # number equal prompts over the whole half, so that a row's random numbers do not depend on its batch
        self.prompts: Prompts = encode(
            model, [entry.prompt for entry in questions], chat=chat, placeholder=mask
        ).number_duplicates()

    def __len__(self) -> int:
        return len(self.questions)

    def decode(self, request: Request, first: int, stop: int) -> tuple[Any, list[list[int]], list[str | None]]:
        """Decode the prompts from `first` to `stop` (exclusive). Returns the output, and for each row the filled ids up
        to its end token, and the text. Raises DecodingFailed: the request does not work."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings are advice for users of one setting
                sampler = make_sampler(self.model, request.sampler)
                output = decode_request(self.model, self.prompts.slice_rows(first, stop), request, sampler)
        except FAILURES as error:
            raise DecodingFailed(str(error) or type(error).__name__) from error
        filled = [
            ids[is_filled].tolist()[:count]
            for ids, is_filled, count in zip(output.sequences, output.filled, output.tokens, strict=True)
        ]
        texts: list[str | None] = [None] * (stop - first) if output.text is None else [*output.text]
        return output, filled, texts

    def measure(
        self,
        request: Request,
        first: int,
        stop: int,
        batch: int,
        scorer: Scorer,
        references: dict[int, list[int]],
        is_reference: bool = False,
    ) -> Measured:
        """Decode the prompts from `first` to `stop` (exclusive), `batch` at a time.

        Args:
            references: by index of the prompt, ids of the reference's answer, if the scorer needs them.
            is_reference: whether the request is the reference; if so, its ids are stored in `references`.

        Raises: the errors of `decode` and of the checker.
        """
        measured = Measured()
        for start in range(first, stop, batch):
            end = min(start + batch, stop)
            output, filled, texts = self.decode(request, start, end)
            for offset, (tokens, text) in enumerate(zip(filled, texts, strict=True)):
                entry = self.questions[start + offset]
                if is_reference:
                    references[start + offset] = tokens
                measured.score.append(scorer.score(entry, tokens, text, references.get(start + offset)))
                measured.truth.append(score_by_truth(entry, tokens, text))
            num_rows = end - start
            measured.forwards += [int(count) for count in output.row_nfe]
            measured.positions += [output.forwarded_tokens / num_rows] * num_rows
            measured.seconds += [output.seconds / num_rows] * num_rows
        return measured
