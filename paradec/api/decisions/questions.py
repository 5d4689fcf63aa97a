"""Questions whose answer is one of a few labels."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import check_text, shown

TYPES = ("noul", "choice", "score", "span")
"""Types of questions: of `YesNo`, `Pick`, `Score` and `Span`; transformers' names."""
Options = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question as templates read it, with the fields of transformers' decision pipeline. Base of `YesNo`, `Pick`,
    `Score` and `Span`, which raise ValueError or TypeError for a wrong argument; the message names it."""

    type: str
    """"noul", "choice", "score" or "span"."""
    instructions: Any
    """The question, a text or data of JSON; None where the state or the options ask it."""
    labels: list[str]
    """What the model may answer, one for each option."""
    descriptions: list[Any]
    """What the options mean; None for no more than their names."""
    values: tuple[Any, ...]
    """The options as a `Decision` names them."""

    def __post_init__(self) -> None:
        check_json("instructions", self.instructions)

    @property
    def options(self) -> list[str]:
        """The values as texts."""
        return [str(value).lower() if isinstance(value, bool) else str(value) for value in self.values]

    def rotated(self, by: int) -> Question:
        """The same question with its options in another order under the same labels: option i is where i - `by` was."""
        descriptions, values = self.descriptions[by:] + self.descriptions[:by], self.values[by:] + self.values[:by]
        return Question(self.type, self.instructions, self.labels, descriptions, values)


class YesNo(Question):
    """Whether something is true.

    Args:
        true, false: what the two answers mean. labels: what the model answers for true and for false.
    """

    def __init__(
        self, instructions: Any = None, true: Any = None, false: Any = None, labels: Sequence[str] = ("Yes", "No")
    ):
        if instructions is None and true is None and false is None:
            raise ValueError("a YesNo needs instructions, or what true or false means")
        check_json("true", true)
        check_json("false", false)
        super().__init__("noul", instructions, _check_labels(labels, 2), [true, false], (True, False))


class Pick(Question):
    """One of several options, which the model is told, each with a label.

    Args:
        options: different texts, or a mapping of texts to what they mean (None: nothing more).
        labels: what the model answers, one for each option; None is A, B, C, ..., of at most 26 options.
    """

    def __init__(self, instructions: Any = None, options: Options = (), labels: Sequence[str] | None = None):
        values = _check_texts("options", options)
        told = [*options.values()] if isinstance(options, Mapping) else [None] * len(values)
        check_json("options", *told)
        super().__init__("choice", instructions, _check_labels(labels, len(values)), told, values)


class Score(Question):
    """A level on a scale, which the model is told.

    Args:
        levels: what each level means, lowest first: texts, or data of JSON. labels: as for `Pick`.
    """

    def __init__(self, instructions: Any = None, levels: Sequence[Any] = (), labels: Sequence[str] | None = None):
        told = [] if isinstance(levels, (str, bytes)) or not isinstance(levels, Sequence) else [*levels]
        if not told or any(level is None for level in told):
            raise ValueError(f"levels={shown(levels)} must be what each level means, lowest first, and none of it None")
        check_json("levels", *told)
        super().__init__("score", instructions, _check_labels(labels, len(told)), told, tuple(range(len(told))))


class Span(Question):
    """One of several texts, which the model would write itself and is not told, as under `paradec.Choice`.

    Args:
        texts: different texts, of any number of tokens.
    """

    def __init__(self, instructions: Any = None, texts: Sequence[str] = ()):
        values = _check_texts("texts", texts)
        super().__init__("span", instructions, [*values], [None] * len(values), values)


def check_json(name: str, *values: Any) -> None:
    """Raise ValueError or TypeError unless values are data that JSON can hold, in texts that are UTF-8."""
    for value in values:
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
    check_json(name, *texts)
    return texts


def _check_labels(given: Any, count: int) -> list[str]:
    """Raise ValueError unless there is a label for each option; return the labels, letters where none are given."""
    if given is None and count > len(string.ascii_uppercase):
        raise ValueError(f"{count} options are more than the 26 letters; give labels, or fewer options")
    labels = [*string.ascii_uppercase[:count]] if given is None else [*_check_texts("labels", given)]
    if len(labels) != count:
        raise ValueError(f"labels={shown(given)} must be {count}: one for each option")
    return labels
