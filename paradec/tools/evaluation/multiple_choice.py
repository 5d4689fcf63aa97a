"""Multiple choice by decoding: which of several continuations a model writes when a constraint holds it to them.

One answer of a few forwards stands in for the log-likelihood of every choice, which takes a masked model a hundred
forwards each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paradec.api.output import Output
from paradec.batching.many import generate_many
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.values import Constraint, of_sequences
from paradec.request import Request

CHOICES = ("score", "decode")
"""Ways to answer a task with choices."""


@dataclass(frozen=True)
class Sequences(Constraint):
    """One of several sequences of ids, whatever they read."""

    ids: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"ids": [[*ids] for ids in self.ids]}

    def lifted(self, tokenizer: Any, vocab_size: int) -> TokenAutomaton:
        return of_sequences(self.ids, vocab_size)


def decoded(
    model: Any, request: Request, asked: Sequence[tuple[list[int], list[list[int]]]], batch_size: int
) -> Iterator[tuple[int, Output]]:
    """For each (context, continuations), as ids: the number of the continuation that the model writes, and the output.

    Args:
        request: how it decodes; the answer has the tokens of the longest continuation, and an end token. batch_size:
            rows decoded together.

    Raises:
        ValueError: the model has no end token, or what `paradec.generate` refuses of this request with a constraint.
    """
    if not model.facts.eos_token_ids:
        raise ValueError(f"choices='decode' needs an end token, and {model.facts.name} has none")
    entries = [
        {
            "prompt": context,
            "constraint": Sequences(tuple(map(tuple, continuations))),
            "max_new_tokens": max(map(len, continuations)) + 1,
        }
        for context, continuations in asked
    ]
    ends = {*model.facts.eos_token_ids}
    with generate_many(model, entries, batch_size=batch_size, errors="raise", preset=request) as outputs:
        for (_, continuations), output in zip(asked, outputs, strict=True):
            new = output.new_tokens.flatten().tolist()
            yield (
                next(
                    number
                    for number, ids in enumerate(continuations)
                    if new[: len(ids)] == ids and new[len(ids)] in ends
                ),
                output,
            )
