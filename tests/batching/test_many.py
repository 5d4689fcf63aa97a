"""`generate_many`: the order of answers, how far it reads ahead, and what a prompt may be."""

from __future__ import annotations

import itertools
import json
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batches import Failing, drained
from tiny_models import tiny

import paradec
from paradec import Interrupted, Request, generate_many
from paradec.batching.batch import Batch
from paradec.batching.slots import Cancelled
from paradec.models.adapter import Model

ROWS = [[index, *range(index % 5)] for index in range(12)]
"""Of one to five tokens."""
REQUEST: dict[str, Any] = {"block_length": 4, "max_new_tokens": 8, "temperature": 0.8, "seed": 2}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(1)


@pytest.fixture(scope="module")
def whole(model: Model) -> list[list[int]]:
    return paradec.generate(model, ROWS, **REQUEST).new_tokens.tolist()


def uneven(rows: list[list[int]] = ROWS) -> Iterator[dict[str, Any]]:
    """Answers of unequal lengths: every third is twice as long."""
    for index, row in enumerate(rows):
        yield {"prompt": row, "max_new_tokens": 8 if index % 3 == 0 else 4, "id": f"name {index}"}


def test_answers_come_in_the_order_of_the_prompts(model: Model) -> None:
    outs = list(generate_many(model, uneven(), batch_size=3, **REQUEST))
    assert [out.index for out in outs] == list(range(12)) and [out.id for out in outs] == [
        f"name {i}" for i in range(12)
    ]
    for index, out in enumerate(outs):
        new = 8 if index % 3 == 0 else 4
        alone = paradec.generate(model, ROWS[index], **{**REQUEST, "max_new_tokens": new})
        assert torch.equal(out.new_tokens, alone.new_tokens) and out.row_nfe == alone.row_nfe


def test_answers_come_as_they_are_whole(model: Model, whole: list[list[int]]) -> None:
    request = {**REQUEST, "sampler": "low_confidence"}
    outs = list(generate_many(model, uneven(), batch_size=3, order="completed", **request))
    order = [out.index for out in outs]
    assert sorted(order) == list(range(12)) and order[:2] == [1, 2]  # four steps; the first prompt takes eight


def test_no_more_is_read_than_is_decoded_and_held_back(model: Model) -> None:
    read = 0

    def endless() -> Iterator[Any]:
        nonlocal read
        for index in itertools.count():
            read += 1
            yield {"prompt": ROWS[index % 12], "max_new_tokens": 32 if index == 0 else 4}

    request = {**REQUEST, "sampler": "low_confidence", "eos_early_stop": False}
    many = generate_many(model, endless(), batch_size=3, look_ahead=4, **request)
    assert read == 0
    assert next(many).index == 0 and read == 7
    assert [out.index for out in itertools.islice(many, 6)] == [1, 2, 3, 4, 5, 6]
    assert read <= 6 + 7
    many.close()
    assert list(many) == [] and many.batch.occupied == 0


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_prompt_that_fails_has_an_output_of_its_own(model: Model, whole: list[list[int]], order: str) -> None:
    prompts = [
        ROWS[0],
        [99],
        [1] * 600,
        "text",
        {"prompt": ROWS[1], "nonsense": 1},
        {"prompt": ROWS[2], "top_k": -1},
        3,
    ]
    outs = list(generate_many(model, [*prompts, ROWS[3]], batch_size=2, order=order, **REQUEST))
    outs.sort(key=lambda out: out.index)
    assert [out.index for out in outs] == list(range(8))
    said = ["", "input id 99", "longer than", "has no tokenizer", "'nonsense'", "top_k=-1", "prompt must be text", ""]
    for out, words in zip(outs, said, strict=True):
        assert (out.error is None) == (not words) and words in str(out.error or "")
        assert json.loads(json.dumps(out.to_dict()))["index"] == out.index
    assert outs[0].new_tokens[0].tolist() == whole[0] and outs[7].new_tokens[0].tolist() == whole[3]
    assert outs[2].sequences.tolist() == [[1] * 600] and outs[1].sequences.shape == (1, 0)


def test_errors_can_be_raised_in_their_place(model: Model, whole: list[list[int]]) -> None:
    many = generate_many(model, [ROWS[0], [99], ROWS[1]], errors="raise", **REQUEST)
    assert next(many).new_tokens[0].tolist() == whole[0]
    with pytest.raises(ValueError, match="input id 99") as caught:
        next(many)
    assert caught.value.__notes__ == ["prompt 1 of generate_many"]
    assert [out.index for out in many] == [2]


class Reader(UserDict[str, Any]):
    """A prompt that calls something while it is read."""

    def __init__(self, prompt: list[int], called: Callable[[], Any]):
        super().__init__(prompt=prompt)
        self.called = called

    def __iter__(self) -> Iterator[str]:
        self.called()
        return super().__iter__()


def test_any_error_of_a_prompt_is_its_own(model: Model, whole: list[list[int]]) -> None:
    def broken() -> None:
        raise RuntimeError("no such file")

    for errors in ("output", "raise"):
        failing = Failing(model, token=38, error=OverflowError("too big"))
        prompts = [ROWS[0], Reader(prompt=[1], called=broken), [3, 38], ROWS[1], ROWS[2]]
        many, found = generate_many(failing, prompts, errors=errors, batch_size=3, **REQUEST), []
        while True:
            try:
                found.append(next(many))
            except StopIteration:
                break
            except (RuntimeError, OverflowError) as error:
                found.append(error)
        errors_found = [out if isinstance(out, Exception) else out.error for out in found]
        assert [str(error or "") for error in errors_found] == ["", "no such file", "too big", "", ""]
        assert [found[at].new_tokens[0].tolist() for at in (0, 3, 4)] == whole[:3]


def test_a_prompt_may_be_taken_back_while_it_is_read(model: Model, whole: list[list[int]]) -> None:
    prompts: list[Any] = [ROWS[0], None, ROWS[2]]
    many = generate_many(model, prompts, batch_size=2, **REQUEST)
    kept: list[bool] = []
    prompts[1] = Reader(prompt=ROWS[1], called=lambda: kept.append(many.cancel(1)))
    outs = list(many)
    assert kept[0] is True and isinstance(outs[1].error, Cancelled)
    assert [outs[at].new_tokens[0].tolist() for at in (0, 2)] == [whole[0], whole[2]]


def test_a_prompt_may_bring_a_request(model: Model) -> None:
    own = Request(temperature=0.5, max_new_tokens=4, suppress_tokens=(3, 4))
    chosen = [(ROWS[0], own), {"prompt": ROWS[1], "seed": 9}, {"input_ids": [ROWS[2]]}, torch.tensor(ROWS[3])]
    outs = list(generate_many(model, chosen, batch_size=4, **REQUEST))
    changes = [own.changes(), {"seed": 9}, {}, {}]
    for out, row, each in zip(outs, ROWS, changes, strict=False):
        assert torch.equal(out.new_tokens, paradec.generate(model, row, **{**REQUEST, **each}).new_tokens)


def test_texts_are_strings() -> None:
    model = paradec.load(dtype="float64")
    texts = ["Sort: pear fig apple", "Sort: fig kiwi plum", [{"role": "user", "content": "Sort: plum fig pear"}]]
    request = {"temperature": 1.0, "seed": 4, "cache": "dual", "stop_strings": "fig"}
    outs = list(generate_many(model, texts, batch_size=2, **request))
    together = paradec.generate(model, [*texts[:2], texts[2][0]["content"]], **request)
    assert [out.text for out in outs] == together.text and [out.finished[0] for out in outs] == together.finished


def test_prompts_are_taken_back_by_their_number(model: Model, whole: list[list[int]]) -> None:
    many = generate_many(model, ROWS, batch_size=2, **{**REQUEST, "sampler": "low_confidence"})
    assert many.cancel(1) and many.cancel(5)
    outs = list(many)
    assert [isinstance(out.error, Cancelled) for out in outs] == [index in (1, 5) for index in range(12)]
    assert outs[5].tokens == [0] and not many.cancel(3)


def test_nothing_is_lost_by_an_interrupt(model: Model, whole: list[list[int]]) -> None:
    request = {**REQUEST, "sampler": "low_confidence"}
    rows = [[index, 1] for index in range(6)]
    expected = [out.new_tokens.tolist() for out in generate_many(model, uneven(rows), **request)]
    failing = Failing(model, calls=9, error=KeyboardInterrupt())  # two calls a step: the lengths differ
    many = generate_many(failing, uneven(rows), batch_size=3, **request)
    with pytest.raises(Interrupted) as caught:
        next(many)
    held = caught.value.output
    assert [out.index for out in held] == [1, 2]
    assert [out.new_tokens.tolist() for out in held] == expected[1:3]
    assert [out.new_tokens.tolist() for out in many] == expected


def test_an_interrupt_between_the_calls_of_two_groups_loses_nothing(model: Model) -> None:
    raised = []

    class Interrupting(Failing):
        def __call__(self, query: Any, *store: Any) -> Any:
            if many.batch._ended and not raised:
                raised.append(True)
                raise KeyboardInterrupt
            return self.model(query, *store)

    request = {**REQUEST, "sampler": "low_confidence", "eos_early_stop": False}
    rows = [{"prompt": [7]}, {"prompt": [8], "max_new_tokens": 4}, {"prompt": [9], "temperature": 0.5}]
    expected = [out.new_tokens.tolist() for out in generate_many(model, rows, **request)]
    many = generate_many(Interrupting(model), rows, batch_size=3, **request)
    with pytest.raises(Interrupted) as caught:
        next(many)
    assert [(out.index, out.new_tokens.tolist()) for out in caught.value.output] == [(1, expected[1])]
    assert [out.new_tokens.tolist() for out in many] == expected


def test_a_source_that_fails_says_so_and_what_was_read_is_still_answered(model: Model, whole: list[list[int]]) -> None:
    def source() -> Iterator[Any]:
        yield ROWS[0]
        yield ROWS[1]
        raise OSError("the file is gone")

    many = generate_many(model, source(), batch_size=4, **REQUEST)
    with pytest.raises(OSError, match="the file is gone"):
        next(many)
    assert [out.new_tokens[0].tolist() for out in many] == whole[:2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": "best"}, "unknown order: 'best'"),
        ({"errors": "ignore"}, "unknown errors: 'ignore'"),
        ({"look_ahead": -1}, "look_ahead=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_memory": 0}, "max_memory=0"),
        ({"seed": [1, 2]}, "give each prompt its own"),
        ({"gen_length": 3}, "max_new_tokens"),
        ({"prompts": "one text"}, "one alone goes to paradec.generate"),
        ({"prompts": 3}, "must be an iterable"),
    ],
)
def test_bad_arguments_are_named_before_a_prompt_is_read(model: Model, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        generate_many(model, **{"prompts": iter(ROWS), **REQUEST, **changes})


def test_the_batch_is_full_as_long_as_prompts_last(model: Model) -> None:
    many = generate_many(model, uneven(), batch_size=4, **{**REQUEST, "sampler": "low_confidence"})
    full = []
    step = many.batch.step
    many.batch.step = lambda: (found := step(), full.append(many.batch.occupied + len(found)))[0]  # type: ignore[method-assign]
    assert len(list(many)) == 12
    assert full[:10] == [4] * 10
    with Batch(model, batch_size=4, **REQUEST) as batch:
        assert drained(batch) == []
