"""Questions whose answer is one of a few labels."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from paradec.core.checks import check_text, shown

LETTERS = tuple(string.ascii_uppercase)
"""Labels of options and levels."""


@dataclass(frozen=True)
class Asked:
    """A question as a template reads it; the fields are those of a question of transformers' decision pipeline.

    `labels` are what the model may answer, one for each of the `options`; `descriptions` what these mean, None where
    nothing is told; `values` what a `Decision` calls them.
    """

    type: str
    """"noul", "choice", "score" or "span"."""
    instructions: Any
    """Text or data of JSON; None asks by the options alone."""
    options: list[str]
    labels: list[str]
    descriptions: list[Any]
    values: tuple[Any, ...]

    def rotated(self, by: int) -> Asked:
        """The same question with its options in another order under the same labels: option i is where i - `by` was."""
        options, descriptions = ([*of[by:], *of[:by]] for of in (self.options, self.descriptions))
        return replace(self, options=options, descriptions=descriptions, values=self.values[by:] + self.values[:by])


@dataclass(frozen=True)
class Question:
    """Base of the four kinds. A wrong argument raises ValueError or TypeError; the message names it."""

    instructions: Any = None

    type: ClassVar[str] = ""
    """What transformers calls the kind; `temperature` of `decide` goes by it."""

    def __post_init__(self) -> None:
        check_json("instructions", self.instructions)

    def asked(self) -> Asked:
        """The question as a template reads it."""
        raise NotImplementedError


@dataclass(frozen=True)
class YesNo(Question):
    """Whether something is true.

    Args:
        instructions: the question, a text or data of JSON.
        true, false: what the two answers mean, told to the model where given.
        labels: what the model answers for true and for false.

    Raises:
        ValueError, TypeError: an argument of another kind; the message names it.
    """

    true: Any = None
    false: Any = None
    labels: Sequence[str] = ("Yes", "No")

    type: ClassVar[str] = "noul"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_json("true", self.true)
        check_json("false", self.false)
        if self.instructions is None and self.true is None and self.false is None:
            raise ValueError("a YesNo needs instructions, or what true or false means")
        object.__setattr__(self, "labels", _check_labels(self.labels, 2))

    def asked(self) -> Asked:
        told = [self.true, self.false]
        return Asked(self.type, self.instructions, ["true", "false"], [*self.labels], told, (True, False))


@dataclass(frozen=True)
class Pick(Question):
    """One of several options, which the model is told, each with a label.

    Args:
        instructions: the question, a text or data of JSON; None where the options say it.
        options: different texts, or a mapping of texts to what they mean (None: nothing more).
        labels: what the model answers, one for each option; None is A, B, C, ..., of at most 26 options.

    Raises:
        ValueError, TypeError: an argument of another kind; the message names it.
    """

    options: Sequence[str] | Mapping[str, Any] = ()
    labels: Sequence[str] | None = None
    descriptions: tuple[Any, ...] = field(init=False, repr=False, default=())

    type: ClassVar[str] = "choice"

    def __post_init__(self) -> None:
        super().__post_init__()
        options = _check_texts("options", self.options)
        told = tuple(self.options.values()) if isinstance(self.options, Mapping) else (None,) * len(options)
        for text in told:
            check_json("options", text)
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "descriptions", told)
        object.__setattr__(self, "labels", _check_labels(self.labels, len(options)))

    def asked(self) -> Asked:
        options, labels = [*self.options], [*(self.labels or ())]
        return Asked(self.type, self.instructions, options, labels, [*self.descriptions], tuple(options))


@dataclass(frozen=True)
class Score(Question):
    """A level on a scale, which the model is told.

    Args:
        instructions: the question, a text or data of JSON; None where the levels say it.
        levels: what each level means, lowest first: texts, or data of JSON.
        labels: as for `Pick`.

    Raises:
        ValueError, TypeError: an argument of another kind; the message names it.
    """

    levels: Sequence[Any] = ()
    labels: Sequence[str] | None = None

    type: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.levels, (str, bytes)) or not isinstance(self.levels, Sequence) or not len(self.levels):
            raise ValueError(f"levels={shown(self.levels)} must be a sequence of what each level means, lowest first")
        for level in self.levels:
            check_json("levels", level)
            if level is None:
                raise ValueError(f"levels={shown(self.levels)}: each level needs a text")
        object.__setattr__(self, "levels", tuple(self.levels))
        object.__setattr__(self, "labels", _check_labels(self.labels, len(self.levels)))

    def asked(self) -> Asked:
        values, labels = tuple(range(len(self.levels))), [*(self.labels or ())]
        return Asked(self.type, self.instructions, [*map(str, values)], labels, [*self.levels], values)


@dataclass(frozen=True)
class Span(Question):
    """One of several texts, which the model would write itself; it is told nothing of them, as under
    `paradec.Choice`.

    Args:
        instructions: the question, a text or data of JSON; None where the state asks.
        texts: different texts, of any number of tokens.

    Raises:
        ValueError, TypeError: an argument of another kind; the message names it.
    """

    texts: Sequence[str] = ()

    type: ClassVar[str] = "span"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "texts", _check_texts("texts", self.texts))

    def asked(self) -> Asked:
        texts = [*self.texts]
        return Asked(self.type, self.instructions, texts, texts, [None] * len(texts), tuple(texts))


def check_json(name: str, value: Any) -> None:
    """Raise ValueError or TypeError unless a value is data that JSON can hold, in texts that are UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={shown(value)} must be a text or data of JSON: {shown(str(error))}") from None
    check_text(name, text)


def _check_texts(name: str, given: Any) -> tuple[str, ...]:
    """Raise ValueError unless given are different texts, none of them empty; return them."""
    texts = () if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, Mapping)) else tuple(given)
    if not texts or not all(isinstance(text, str) and text for text in texts) or len({*texts}) < len(texts):
        raise ValueError(f"{name}={shown(given)} must be different texts, none of them empty, and at least one")
    for text in texts:
        check_text(name, text)
    return texts


def _check_labels(given: Any, count: int) -> tuple[str, ...]:
    """Raise ValueError unless there is a label for each option; return the labels, letters where none are given."""
    if given is None:
        if count > len(LETTERS):
            raise ValueError(f"{count} options are more than the {len(LETTERS)} letters; give labels, or fewer options")
        return LETTERS[:count]
    labels = _check_texts("labels", given)
    if len(labels) != count:
        raise ValueError(f"labels={shown(given)} must be {count}: one for each option")
    return labels
