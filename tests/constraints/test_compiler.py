"""Constraints that are compiled in a process of their own."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from decoding import refuses
from tokenized_models import TOKENIZER, VOCAB

from paradec.constraints.automaton import ConstraintSizeError
from paradec.constraints.compiler import Compiler
from paradec.constraints.values import Constraint, JsonSchema, Regex, token_automaton


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler(TOKENIZER, VOCAB, seconds=2, max_bytes=2**28)
    yield made
    made.close()


def test_the_automaton_is_that_of_this_process(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Constraint] = [Regex("[ab]{2,5}c?"), JsonSchema({"type": "array", "items": {"enum": [1, "two"]}})]
    arguments = (Regex, "[ab]{2,5}c?"), (JsonSchema, {"type": "array", "items": {"enum": [1, "two"]}})
    for value, (make, argument) in zip(values, arguments, strict=True):
        expected = value.to_token_automaton(TOKENIZER, VOCAB)
        assert compiler.compile(make, argument) == value
        monkeypatch.setattr(type(value), "to_token_automaton", None)  # it is found
        found = token_automaton(value, TOKENIZER, VOCAB, (), ())
        for name in ("edges", "accept", "class_of"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    monkeypatch.setattr(compiler, "_ask", None)
    assert compiler.compile(Regex, "[ab]{2,5}c?") == values[0]  # nothing is compiled again


def test_time_and_memory_are_limited_and_others_go_on(compiler: Compiler) -> None:
    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(compiler.compile, time.sleep, 60)
        large = pool.submit(compiler.compile, bytearray, 2**29)
        assert compiler.compile(Regex, "a{3}") == Regex("a{3}")
        refuses(lambda: large.result(), "more than 256 MiB", ConstraintSizeError)
        refuses(lambda: slow.result(), "more than 2 s or 256 MiB: give a smaller one", ConstraintSizeError)
    assert compiler.compile(Regex, "b{3}") == Regex("b{3}")
    refuses(lambda: compiler.compile(Regex, "("), "cannot be read|position|unbalanced|[(]")
