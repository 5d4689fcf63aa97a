"""Decoding a half's prompts with one request, and what is kept of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paradec.api.generate import decode_request, make_sampler
from paradec.core.prompts import Prompts, encode
from paradec.request import Request
from paradec.tools.tuning.prompts import Asked
from paradec.tools.tuning.scoring import Scorer, truth

FAILURES = (ValueError, FloatingPointError, RuntimeError, NotImplementedError)
"""What decoding raises where a setting does not work, with a device that is out of memory among it."""


class Failed(Exception):
    """A setting could not be decoded; the message says why."""


@dataclass
class Measured:
    """What was measured, one entry per prompt, in the half's order."""

    score: list[float] = field(default_factory=list)
    """From 0 to 1, by what chooses."""
    truth: list[float | None] = field(default_factory=list)
    """From 0 to 1; None where nothing is known of the answer."""
    forwards: list[int] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    """Positions evaluated, padding excluded; a batch's are spread over its rows evenly."""
    seconds: list[float] = field(default_factory=list)
    """Wall time of decoding, spread in the same way."""

    def __len__(self) -> int:
        return len(self.score)

    def add(self, other: Measured) -> None:
        """Append what was measured of the prompts that follow."""
        for entry in fields(self):
            getattr(self, entry.name).extend(getattr(other, entry.name))

    def mean(self, name: str) -> float:
        """The mean of one of the lists, of what is known of it."""
        known = [value for value in getattr(self, name) if value is not None]
        return sum(known) / len(known)

    def point(self, costs: Sequence[str]) -> tuple[float, ...]:
        """The mean score, then the mean costs."""
        return (self.mean("score"), *(self.mean(cost) for cost in costs))

    def to_data(self) -> dict[str, list[Any]]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_data(cls, data: Mapping[str, list[Any]]) -> Measured:
        return cls(**{entry.name: list(data[entry.name]) for entry in fields(cls)})


class Half:
    """The prompts that choose, or those that are reported, encoded once."""

    def __init__(self, name: str, model: Any, asked: Sequence[Asked], chat: bool | None, mask: str | None):
        self.name, self.model, self.asked = name, model, list(asked)
        # numbered among all: what a row draws does not depend on the batch that it is decoded in
        self.prompts: Prompts = encode(model, [entry.prompt for entry in asked], chat=chat, placeholder=mask).numbered()

    def __len__(self) -> int:
        return len(self.asked)

    def decode(self, request: Request, first: int, stop: int) -> tuple[Any, list[list[int]], list[str | None]]:
        """Decode the prompts from `first` to `stop` (exclusive): the output, and of each row the ids that were filled
        up to its end token, and the text.

        Raises:
            Failed: the request does not work.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice for one request; here they are compared
                sampler = make_sampler(self.model, request.sampler)
                output = decode_request(self.model, self.prompts.part(first, stop), request, sampler)
        except FAILURES as error:
            raise Failed(str(error) or type(error).__name__) from error
        filled = [
            ids[there].tolist()[:count]
            for ids, there, count in zip(output.sequences, output.filled, output.tokens, strict=True)
        ]
        text = output.text
        texts: list[str | None] = [None] * (stop - first)
        if text is not None:
            texts = [text] if isinstance(text, str) else [*text]
        return output, filled, texts

    def measure(
        self, request: Request, first: int, stop: int, batch: int, scorer: Scorer, references: Mapping[int, list[int]]
    ) -> Measured:
        """Decode the prompts from `first` to `stop` (exclusive), `batch` together.

        Args:
            references: by prompt, the ids of one token per step, where the scorer needs them.

        Raises: as `decode`; whatever the checker raises.
        """
        found = Measured()
        for begin in range(first, stop, batch):
            end = min(begin + batch, stop)
            output, filled, texts = self.decode(request, begin, end)
            for offset, (tokens, text) in enumerate(zip(filled, texts, strict=True)):
                entry = self.asked[begin + offset]
                found.score.append(scorer.score(entry, tokens, text, references.get(begin + offset)))
                found.truth.append(truth(entry, tokens, text))
            rows = end - begin
            found.forwards += [int(count) for count in output.row_nfe]
            found.positions += [output.forwarded_tokens / rows] * rows
            found.seconds += [output.seconds / rows] * rows
        return found
