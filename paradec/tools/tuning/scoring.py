"""How good an answer is: judged by what is known of it, by the caller's checker, or by one token per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_choice, shown
from paradec.tools.tuning.prompts import Asked

SCORES = ("answers", "checker", "agreement")
Checker = Callable[[Any, Any], float]
"""`checker(prompt, answer)`: how good an answer (a text, or ids of models without a tokenizer) is, from 0 to 1."""


@dataclass(frozen=True)
class Scorer:
    """What chooses between settings.

    Args:
        kind: "answers" (what is known of them), "checker", or "agreement" with one token per step.
        checker: the caller's.
    """

    kind: str
    checker: Checker | None = None

    @classmethod
    def of(cls, asked: Sequence[Asked], kind: str | None, checker: Checker | None) -> Scorer:
        """The scorer that was asked for; by default a checker, else answers where all prompts have one, else
        agreement.

        Raises:
            ValueError: an unknown kind, or one that lacks what it needs. TypeError: a checker that cannot be called.
        """
        if checker is not None and not callable(checker):
            raise TypeError(f"checker={shown(checker)} must be callable: checker(prompt, answer)")
        missing = sum(not entry.judged for entry in asked)
        if kind is None:
            kind = "checker" if checker is not None else "agreement" if missing else "answers"
        check_choice("score", kind, SCORES)
        if kind == "checker" and checker is None:
            raise ValueError("score='checker' needs checker=: a function of prompt and answer")
        if kind != "checker" and checker is not None:
            raise ValueError(f"score={kind!r} uses no checker: leave one of them out")
        if kind == "answers" and missing:
            raise ValueError(f"score='answers' needs an answer to every prompt; {missing} of {len(asked)} have none")
        return cls(kind, checker)

    @property
    def needs_reference(self) -> bool:
        """Whether what one token per step gives must be known."""
        return self.kind == "agreement"

    def score(self, asked: Asked, tokens: Sequence[int], text: str | None, reference: Sequence[int] | None) -> float:
        """How good an answer is, from 0 to 1.

        Args:
            tokens: ids of the filled positions, in order, up to the end token. text: the same without special tokens;
                None without a tokenizer. reference: the ids that one token per step fills in.

        Raises:
            ValueError: a checker that returns something else.
        """
        if self.kind == "agreement":
            return agreement(tokens, reference or ())
        if self.kind == "answers":
            known = truth(asked, tokens, text)
            assert known is not None  # `of` has looked
            return known
        assert self.checker is not None
        value = self.checker(asked.prompt, list(tokens) if text is None else text)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number <= 1:
            raise ValueError(f"checker returned {shown(value)} for {shown(asked.prompt)}; it must be from 0 to 1")
        return number


def truth(asked: Asked, tokens: Sequence[int], text: str | None) -> float | None:
    """How much of what is known of an answer is right, from 0 to 1; None where nothing is known."""
    if asked.truth is not None:
        return agreement(tokens, asked.truth)
    if asked.right is None:
        return None
    if text is None:
        raise ValueError("answers that are texts need a model with a tokenizer; give answers as ids")
    return float(asked.right(text))


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions with equal ids, of the longer one's."""
    longest = max(len(tokens), len(reference))
    equal = sum(a == b for a, b in zip(tokens, reference))
    return equal / longest if longest else 1.0
