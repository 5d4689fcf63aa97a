"""Constraints in batches that are refilled: each prompt's own, and rows that are whole as they begin."""

from __future__ import annotations

import re
from typing import Any

import pytest
from structured import KINDS, lettered

import paradec
from paradec.batching.batch import Batch
from paradec.models.adapter import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return lettered()


def test_answers_are_those_of_generate(model: Model) -> None:
    values = [value for value, _ in KINDS.values()]
    fits = [fits for _, fits in KINDS.values()]
    prompts = [[1 + number, 2, 3] for number in range(9)]
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "block_length": 5}
    many = [
        {"prompt": prompt, "constraint": values[number % 3], "seed": number} for number, prompt in enumerate(prompts)
    ]
    for number, out in enumerate(paradec.generate_many(model, many, batch_size=4, **asked)):
        alone = paradec.generate(model, prompts[number], constraint=values[number % 3], seed=number, **asked)
        assert out.text == alone.text and fits[number % 3](out.text)
        assert out.log_weight == pytest.approx(alone.log_weight)


def test_rows_that_are_whole_as_they_begin(model: Model) -> None:
    with Batch(model, batch_size=2, max_new_tokens=4) as batch:
        tickets = [batch.add([1, 2], constraint=paradec.Choice(["yes"])) for _ in range(3)]
        other = batch.add([1, 2], constraint=paradec.Regex("[0-9]+"))
        for _ in range(20):
            batch.step()
        assert [ticket.done and ticket.output.text for ticket in tickets] == ["yes"] * 3
        assert other.done and re.fullmatch("[0-9]+", other.output.text)
