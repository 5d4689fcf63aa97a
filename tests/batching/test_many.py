"""`generate_many` for texts and images."""

import itertools
import json
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from decoding import Failing, drain, refuses
from every_model import shared_model
from images import IMAGE_MODELS, tiny_llamagen, tiny_masked_image
from small_models import tiny
from torch import Tensor

import paradec
from paradec import Interrupted, Request, generate_images, generate_many, samplers
from paradec.api.images import ImageOutput
from paradec.batching.batch import Batch
from paradec.batching.slots import Cancelled
from paradec.models.adapter import Model
from paradec.models.images.llamagen import LlamaGenModel
from paradec.models.images.uvit import MaskedImageModel

pytestmark = pytest.mark.filterwarnings("ignore:steps=")

ROWS = [[index, *range(index % 5)] for index in range(12)]
"""Prompts of one to five tokens."""
REQUEST: dict[str, Any] = {"block_length": 4, "max_new_tokens": 8, "temperature": 0.8, "seed": 2}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(1)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    return paradec.generate(model, ROWS, **REQUEST).new_tokens.tolist()


def prompts_of_two_lengths(rows: list[list[int]] = ROWS) -> Iterator[dict[str, Any]]:
    """Yield prompts of which every third is decoded to 8 tokens, and the others to 4."""
    for index, row in enumerate(rows):
        yield {"prompt": row, "max_new_tokens": 8 if index % 3 == 0 else 4, "id": f"name {index}"}


def test_answers_have_the_order_of_the_prompts(model: Model) -> None:
    outs = list(generate_many(model, prompts_of_two_lengths(), batch_size=3, **REQUEST))
    assert [(out.index, out.id) for out in outs] == [(i, f"name {i}") for i in range(12)]
    for index, out in enumerate(outs):
        expected = paradec.generate(model, ROWS[index], **{**REQUEST, "max_new_tokens": 4 if index % 3 else 8})
        assert torch.equal(out.new_tokens, expected.new_tokens) and out.row_nfe == expected.row_nfe


def test_answers_can_come_in_order_of_completion(model: Model) -> None:
    request = {**REQUEST, "sampler": "low_confidence", "order": "completed", "batch_size": 3}
    order = [out.index for out in generate_many(model, prompts_of_two_lengths(), **request)]
    assert sorted(order) == list(range(12)) and order[:2] == [1, 2]  # four steps; the first prompt takes eight


def test_prompts_are_read_only_as_needed(model: Model) -> None:
    num_read = 0

    def endless() -> Iterator[Any]:
        nonlocal num_read
        for index in itertools.count():
            num_read += 1
            yield {"prompt": ROWS[index % 12], "max_new_tokens": 32 if index == 0 else 4}

    request = {**REQUEST, "sampler": "low_confidence", "eos_early_stop": False}
    outputs = generate_many(model, endless(), batch_size=3, look_ahead=4, **request)
    assert num_read == 0
    assert next(outputs).index == 0 and num_read == 7
    assert [out.index for out in itertools.islice(outputs, 6)] == [1, 2, 3, 4, 5, 6]
    assert num_read <= 6 + 7
    outputs.close()
    assert list(outputs) == [] and outputs.batch.occupied == 0


@pytest.mark.parametrize("order", ["input", "completed"])
def test_a_prompt_that_fails_has_an_output_with_its_error(model: Model, expected: list[list[int]], order: str) -> None:
    prompts = [
        ROWS[0], [99], [1] * 600, "text", {"prompt": ROWS[1], "nonsense": 1}, {"prompt": ROWS[2], "top_k": -1}, 3,
    ]  # fmt: skip
    outs = list(generate_many(model, [*prompts, ROWS[3]], batch_size=2, order=order, **REQUEST))
    outs.sort(key=lambda out: out.index)
    assert [out.index for out in outs] == list(range(8))
    errors = ["", "input id 99", "longer than", "has no tokenizer", "'nonsense'", "top_k=-1", "prompt must be text", ""]
    for out, error in zip(outs, errors, strict=True):
        assert (out.error is None) == (not error) and error in str(out.error or "")
        assert json.loads(json.dumps(out.to_dict()))["index"] == out.index
    assert outs[0].new_tokens[0].tolist() == expected[0] and outs[7].new_tokens[0].tolist() == expected[3]
    assert outs[2].sequences.tolist() == [[1] * 600] and outs[1].sequences.shape == (1, 0)


def test_errors_can_be_raised_in_their_place(model: Model, expected: list[list[int]]) -> None:
    outputs = generate_many(model, [ROWS[0], [99], ROWS[1]], errors="raise", **REQUEST)
    assert next(outputs).new_tokens[0].tolist() == expected[0]
    with pytest.raises(ValueError, match="input id 99") as caught:
        next(outputs)
    assert caught.value.__notes__ == ["prompt 1 of generate_many"]
    assert [out.index for out in outputs] == [2]


class PromptWithCallback(UserDict[str, Any]):
    """A prompt that calls a function when its fields are read."""

    def __init__(self, prompt: list[int], on_read: Callable[[], Any]):
        super().__init__(prompt=prompt)
        self.on_read = on_read

    def __iter__(self) -> Iterator[str]:
        self.on_read()
        return super().__iter__()


def test_errors_end_only_their_prompt(model: Model, expected: list[list[int]]) -> None:
    def fail() -> None:
        raise RuntimeError("no such file")

    for errors in ("output", "raise"):
        failing = Failing(model, token=38, error=OverflowError("too big"))
        prompts = [ROWS[0], PromptWithCallback([1], fail), [3, 38], ROWS[1], ROWS[2]]
        outputs, outcomes = generate_many(failing, prompts, errors=errors, batch_size=3, **REQUEST), []
        while True:
            try:
                outcomes.append(next(outputs))
            except StopIteration:
                break
            except (RuntimeError, OverflowError) as error:
                outcomes.append(error)
        messages = [str(out if isinstance(out, Exception) else out.error or "") for out in outcomes]
        assert messages == ["", "no such file", "too big", "", ""]
        assert [outcomes[index].new_tokens[0].tolist() for index in (0, 3, 4)] == expected[:3]


def test_a_prompt_may_be_cancelled_while_it_is_read(model: Model, expected: list[list[int]]) -> None:
    prompts: list[Any] = [ROWS[0], None, ROWS[2]]
    outputs = generate_many(model, prompts, batch_size=2, **REQUEST)
    is_cancelled: list[bool] = []
    prompts[1] = PromptWithCallback(ROWS[1], lambda: is_cancelled.append(outputs.cancel(1)))
    outs = list(outputs)
    assert is_cancelled[0] is True and isinstance(outs[1].error, Cancelled)
    assert [outs[index].new_tokens[0].tolist() for index in (0, 2)] == [expected[0], expected[2]]


def test_a_prompt_may_have_a_request(model: Model) -> None:
    request = Request(temperature=0.5, max_new_tokens=4, suppress_tokens=(3, 4))
    prompts = [(ROWS[0], request), {"prompt": ROWS[1], "seed": 9}, {"input_ids": [ROWS[2]]}, torch.tensor(ROWS[3])]
    outs = list(generate_many(model, prompts, batch_size=4, **REQUEST))
    for out, row, changes in zip(outs, ROWS, [request.changes(), {"seed": 9}, {}, {}], strict=False):
        assert torch.equal(out.new_tokens, paradec.generate(model, row, **{**REQUEST, **changes}).new_tokens)


def test_texts_are_strings() -> None:
    model = paradec.load(dtype="float64")
    texts = ["Sort: pear fig apple", "Sort: fig kiwi plum", [{"role": "user", "content": "Sort: plum fig pear"}]]
    request = {"temperature": 1.0, "seed": 4, "cache": "dual", "stop_strings": "fig"}
    outs = list(generate_many(model, texts, batch_size=2, **request))
    expected = paradec.generate(model, [*texts[:2], texts[2][0]["content"]], **request)
    assert [out.text for out in outs] == expected.text and [out.finished[0] for out in outs] == expected.finished


def test_prompts_are_cancelled_by_their_index(model: Model) -> None:
    outputs = generate_many(model, ROWS, batch_size=2, **{**REQUEST, "sampler": "low_confidence"})
    assert outputs.cancel(1) and outputs.cancel(5)
    outs = list(outputs)
    assert [isinstance(out.error, Cancelled) for out in outs] == [index in (1, 5) for index in range(12)]
    assert outs[5].tokens == [0] and not outputs.cancel(3)


def test_no_answer_is_lost_after_an_interrupt(model: Model) -> None:
    request = {**REQUEST, "sampler": "low_confidence"}
    rows = [[index, 1] for index in range(6)]
    expected = [out.new_tokens.tolist() for out in generate_many(model, prompts_of_two_lengths(rows), **request)]
    failing = Failing(model, calls=9, error=KeyboardInterrupt())  # a step makes two calls, because the lengths differ
    outputs = generate_many(failing, prompts_of_two_lengths(rows), batch_size=3, **request)
    with pytest.raises(Interrupted) as caught:
        next(outputs)
    assert [(out.index, out.new_tokens.tolist()) for out in caught.value.output] == [(1, expected[1]), (2, expected[2])]
    assert [out.new_tokens.tolist() for out in outputs] == expected


def test_no_answer_is_lost_after_an_interrupt_between_two_groups(model: Model) -> None:
    raised = []

    class Interrupting(Failing):
        def __call__(self, query: Any, *store: Any) -> Any:
            if outputs.batch._ended and not raised:
                raised.append(True)
                raise KeyboardInterrupt
            return self.model(query, *store)

    request = {**REQUEST, "sampler": "low_confidence", "eos_early_stop": False}
    rows = [{"prompt": [7]}, {"prompt": [8], "max_new_tokens": 4}, {"prompt": [9], "temperature": 0.5}]
    expected = [out.new_tokens.tolist() for out in generate_many(model, rows, **request)]
    outputs = generate_many(Interrupting(model), rows, batch_size=3, **request)
    with pytest.raises(Interrupted) as caught:
        next(outputs)
    assert [(out.index, out.new_tokens.tolist()) for out in caught.value.output] == [(1, expected[1])]
    assert [out.new_tokens.tolist() for out in outputs] == expected


def test_prompts_read_before_an_error_of_their_iterator_are_answered(model: Model, expected: list[list[int]]) -> None:
    def source() -> Iterator[Any]:
        yield ROWS[0]
        yield ROWS[1]
        raise OSError("the file is gone")

    outputs = generate_many(model, source(), batch_size=4, **REQUEST)
    refuses(lambda: next(outputs), "the file is gone", OSError)
    assert [out.new_tokens[0].tolist() for out in outputs] == expected[:2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "best"}, "unknown order: 'best'"),
        ({"look_ahead": -1}, "look_ahead=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": [1, 2]}, "give each prompt its own seed"),
        ({"gen_length": 3}, "max_new_tokens"),
        ({"prompts": "one text"}, "for one prompt, use paradec.generate"),
        ({"prompts": 3}, "must be an iterable"),
    ],
)
def test_bad_arguments_are_named_before_a_prompt_is_read(model: Model, changes: dict[str, Any], message: str) -> None:
    arguments = {"prompts": iter(ROWS), **REQUEST, **changes}
    refuses(lambda: generate_many(model, **arguments), message, (ValueError, TypeError))


def test_the_batch_is_full_while_prompts_are_left(model: Model) -> None:
    outputs = generate_many(model, prompts_of_two_lengths(), batch_size=4, **{**REQUEST, "sampler": "low_confidence"})
    num_rows, step = [], outputs.batch.step

    def counting_step() -> list[Any]:
        ended = step()
        num_rows.append(outputs.batch.occupied + len(ended))
        return ended

    outputs.batch.step = counting_step  # type: ignore[method-assign]
    assert len(list(outputs)) == 12 and num_rows[:10] == [4] * 10
    with Batch(model, batch_size=4, **REQUEST) as batch:
        assert drain(batch) == []


LABELS = [3, 9, 1, 3, 3, 7, 0]
CLASSES = [3, 1, 1, 0, 2]
CAPTIONS = [torch.linspace(-1, 1, length * 16).double().view(length, 16).roll(length) for length in (5, 2, 6, 1, 2)]


@pytest.fixture(scope="module")
def llamagen() -> LlamaGenModel:
    return tiny_llamagen()


@pytest.fixture(scope="module")
def masked() -> MaskedImageModel:
    return tiny_masked_image()


@lru_cache
def image_model(name: str) -> Any:
    return IMAGE_MODELS[name][0]()


class FailingLlamaGen(LlamaGenModel):
    """Call number `failing_call` raises `error`. Rows of the class label `nan_label` get NaN logits."""

    nan_label, error = -100, RuntimeError("unused")
    calls = itertools.count(1)
    failing_call = 0

    def __call__(self, query: Any, store: Any = None) -> Tensor:
        if next(self.calls) == self.failing_call:
            raise self.error
        is_nan = (query.tokens == self.facts.vocab_size + self.nan_label).any(1).view(-1, 1, 1)
        return super().__call__(query, store).masked_fill(is_nan, torch.nan)


def failing_llamagen(model: LlamaGenModel, **fields: Any) -> FailingLlamaGen:
    wrapped = FailingLlamaGen(model.module, model.vq)
    vars(wrapped).update(calls=itertools.count(1), **fields)  # copies of the model share the counter
    return wrapped


def assert_same_images(outs: list[ImageOutput], expected: ImageOutput, accepted: bool = True) -> None:
    assert [out.error for out in outs] == [None] * len(expected.tokens)
    for index, out in enumerate(outs):
        assert out.index == index and out.tokens.tolist() == expected.tokens[index : index + 1].tolist()
        assert out.row_nfe == [expected.row_nfe[index]] and out.draft_nfe == [expected.draft_nfe[index]]
        assert torch.equal(out.codes, expected.codes[index : index + 1])
        assert torch.allclose(out.images, expected.images[index : index + 1])
        if accepted:
            row = np.trim_zeros(expected.accepted[:, index], "b")
            assert np.trim_zeros(out.accepted[:, 0], "b").tolist() == row.tolist()


def generate_both_ways(model: Any, prompts: list[Any], batch_size: int = 2, **request: Any) -> tuple[Any, ImageOutput]:
    """Return the outputs of generate_many and the output of generate_images for all prompts."""
    request |= {"output_type": "latent" if getattr(model, "vq", 0) is None else "pt"}
    outs = list(generate_many(model, prompts, batch_size=batch_size, **request))
    return outs, generate_images(model, **{model.conditions: prompts}, **request)


@pytest.mark.thinned
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", ["sjd", "scd", "sjd_pac", "jacobi", "gsd", "lantern", "speculative"])
def test_autoregressive_images_equal_generate_images(llamagen: LlamaGenModel, name: str, scale: float) -> None:
    settings = {"drafter": tiny_llamagen(seed=1)} if name == "speculative" else {"window": 5}
    request = {"sampler": samplers.create(name, **settings), "guidance_scale": scale, "temperature": 0.9, "seed": 4}
    assert_same_images(*generate_both_ways(llamagen, LABELS, **request))


@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS if not name.startswith("llamagen")])
def test_grids_and_prompts_of_every_family(name: str) -> None:
    request = IMAGE_MODELS[name][1] | {"seed": 1, "guidance_scale": 2.0}
    prompts = [*request.pop("prompts"), *IMAGE_MODELS[name][1]["prompts"][::-1]]
    if "negative_prompt" in request:
        request["negative_prompt"] = request["negative_prompt"][0]
    assert_same_images(*generate_both_ways(image_model(name), prompts, batch_size=3, **request))


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_captions_move_with_their_rows(scale: float) -> None:
    request = {"sampler": "jacobi", "guidance_scale": scale, "seed": 1}
    assert_same_images(*generate_both_ways(image_model("llamagen-t2i"), CAPTIONS, **request))


@pytest.mark.parametrize("name", ["maskgit", "recap", "halton", "threshold", "wino"])
def test_masked_images_equal_generate_images(masked: MaskedImageModel, name: str) -> None:
    request = {"sampler": name, "guidance_scale": 2.0, "temperature": 1.0, "seed": 4}
    request |= {"steps": 4} if samplers.registry.get(name).uses_steps else {}
    outs, expected = generate_both_ways(masked, CLASSES, batch_size=3, **request)
    assert_same_images(outs, expected, accepted=name != "wino")  # wino remasks tokens
    assert all(out.accepted.sum() == outs[0].grid.length for out in outs)
    refuses(lambda: outs[0].steps, "not written in order")


def test_packaged_digits_as_pil() -> None:
    model = paradec.load("digits-ar", dtype="float64")
    outs = list(generate_many(model, range(3), batch_size=2, seed=0))
    expected = generate_images(model, class_labels=range(3), seed=0)
    for index, out in enumerate(outs):
        assert out.tokens.tolist() == expected.tokens[index : index + 1].tolist()
        assert out.images[0].tobytes() == expected.images[index].tobytes()
        assert out.steps.tolist() == expected.steps[index : index + 1].tolist()


def test_image_prompts_may_have_requests(llamagen: LlamaGenModel) -> None:
    second = Request(temperature=0.5, guidance_scale=2.0)
    prompts = [{"prompt": 3, "seed": 9, "id": "a"}, (1, second), {"prompt": 2, "sampler": "jacobi"}, torch.tensor(7), 3]
    changes_of_prompts = [{"seed": 9}, second.changes(), {"sampler": "jacobi"}, {}, {}]
    request = {"sampler": "sjd", "seed": 1, "top_k": 6, "output_type": "latent"}
    outs = list(generate_many(llamagen, prompts, batch_size=2, order="completed", **request))
    outs.sort(key=lambda out: out.index)
    assert outs[0].id == "a"
    for out, label, changes in zip(outs, (3, 1, 2, 7, 3), changes_of_prompts, strict=True):
        expected = generate_images(llamagen, class_labels=label, **{**request, **changes})
        assert out.tokens.tolist() == expected.tokens.tolist()


def test_prompts_may_have_different_negative_prompts() -> None:
    model, request = image_model("janus"), {"seed": 2, "guidance_scale": 3.0, "output_type": "latent"}
    prompts = [{"prompt": [1, 20, 9], "negative_prompt": [1, 7, 9]}, {"prompt": [1, 30, 9]}]
    outs = list(generate_many(model, prompts, negative_prompt=[1, 8, 8, 9], **request))
    negative = [[1, 7, 9], [1, 8, 8, 9]]
    expected = generate_images(model, [entry["prompt"] for entry in prompts], negative_prompt=negative, **request)
    assert [out.tokens[0].tolist() for out in outs] == expected.tokens.tolist()


def test_errors_end_only_their_image(llamagen: LlamaGenModel) -> None:
    model = failing_llamagen(llamagen, nan_label=8)
    request = {"seed": 4, "output_type": "pt"}
    refused = [10, "a cat", [1, 2], {"prompt": 1, "max_new_tokens": 3}, {"prompt": 1, "trace": True}, 8]
    outs = list(generate_many(model, [*LABELS[:2], *refused, *LABELS[2:]], batch_size=2, **request))
    errors = ["class_labels=10 must be", "class_labels='a cat'", "2 rows", "max_new_tokens=3 has", "trace=True", "NaN"]
    for out, error in zip(outs[2:8], errors, strict=True):
        assert error in str(out.error) and out.images is None and out.codes is None
    expected = generate_images(llamagen, class_labels=LABELS, **request)
    assert [out.tokens[0].tolist() for out in [*outs[:2], *outs[8:]]] == expected.tokens.tolist()
    refuses(lambda: next(generate_many(llamagen, [10], errors="raise")), "class_labels=10")


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_rows_that_do_not_fit_into_memory_are_decoded_again(llamagen: LlamaGenModel, kind: str) -> None:
    plain, prompts = (llamagen, LABELS) if kind == "c2i" else (image_model("llamagen-t2i"), CAPTIONS)
    model = failing_llamagen(plain, failing_call=4, error=torch.OutOfMemoryError("CUDA out of memory"))
    request = {"seed": 4, "output_type": "pt", "sampler": "jacobi"}
    outs = list(generate_many(model, prompts, batch_size=4, **request))
    assert_same_images(outs, generate_images(plain, **{plain.conditions: prompts}, **request))


def test_max_memory_limits_the_rows(llamagen: LlamaGenModel) -> None:
    request = {"batch_size": 4, "seed": 4, "output_type": "latent"}
    outputs = generate_many(llamagen, LABELS, max_memory=2**40, **request)
    next(outputs)
    row_bytes = max(group.row_bytes for group in outputs.batch._groups)
    outputs.close()
    outputs = generate_many(llamagen, LABELS, max_memory=int(2.5 * row_bytes), **request)
    occupied = [outputs.batch.occupied for _ in outputs]
    assert len(occupied) == 7 and max(occupied) <= 2


@pytest.mark.parametrize("kind", ["var", "lpd", "nar", "mar", "distilled", "distilled var"])
def test_models_whose_rows_end_together_are_refused(kind: str) -> None:
    message = "end together.*: give it to paradec.generate_images"
    refuses(lambda: generate_many(shared_model(kind), [1]), message, TypeError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": "zipar"}, "'zipar' .* end together; use paradec.generate_images"),
        ({"max_new_tokens": 4}, "max_new_tokens=4 has no meaning for pictures"),
        ({"trace": True}, "trace=True does not work"),
        ({"seed": (1, 2)}, "must be one int here"),
        ({"height": 32}, "height=32"),
        ({"model": tiny_llamagen(vq=False)}, "has no VQ decoder"),
        ({"model": tiny(1), "height": 32}, "height=32 is for image models"),
    ],
)
def test_image_arguments_are_refused_before_a_prompt_is_read(llamagen: Any, arguments: Any, message: str) -> None:
    prompts = iter(lambda: pytest.fail("read"), None)
    refuses(lambda: generate_many(**{"model": llamagen, "prompts": prompts} | arguments), message)


def test_captions_of_a_drafter_are_refused() -> None:
    model = image_model("llamagen-t2i")
    sampler = samplers.create("speculative", drafter=tiny_llamagen("t2i", seed=1))
    (out,) = generate_many(model, CAPTIONS[:1], sampler=sampler, output_type="latent")
    assert "at its start; use paradec.generate_images" in str(out.error)
