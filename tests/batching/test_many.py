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
def whole(model: Model) -> list[list[int]]:
    return paradec.generate(model, ROWS, **REQUEST).new_tokens.tolist()


def uneven(rows: list[list[int]] = ROWS) -> Iterator[dict[str, Any]]:
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


def test_answers_can_come_in_order_of_completion(model: Model, whole: list[list[int]]) -> None:
    request = {**REQUEST, "sampler": "low_confidence"}
    order = [out.index for out in list(generate_many(model, uneven(), batch_size=3, order="completed", **request))]
    assert sorted(order) == list(range(12)) and order[:2] == [1, 2]  # four steps; the first prompt takes eight


def test_prompts_are_read_only_as_needed(model: Model) -> None:
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
        ROWS[0], [99], [1] * 600, "text", {"prompt": ROWS[1], "nonsense": 1}, {"prompt": ROWS[2], "top_k": -1}, 3,
    ]  # fmt: skip
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
    def __init__(self, prompt: list[int], called: Callable[[], Any]):
        super().__init__(prompt=prompt)
        self.called = called

    def __iter__(self) -> Iterator[str]:
        self.called()
        return super().__iter__()


def test_errors_end_only_their_prompt(model: Model, whole: list[list[int]]) -> None:
    def broken() -> None:
        raise RuntimeError("no such file")

    for errors in ("output", "raise"):
        failing = Failing(model, token=38, error=OverflowError("too big"))
        prompts = [ROWS[0], Reader(prompt=[1], called=broken), [3, 38], ROWS[1], ROWS[2]]
        many, outcomes = generate_many(failing, prompts, errors=errors, batch_size=3, **REQUEST), []
        while True:
            try:
                outcomes.append(next(many))
            except StopIteration:
                break
            except (RuntimeError, OverflowError) as error:
                outcomes.append(error)
        errors_found = [out if isinstance(out, Exception) else out.error for out in outcomes]
        assert [str(error or "") for error in errors_found] == ["", "no such file", "too big", "", ""]
        assert [outcomes[at].new_tokens[0].tolist() for at in (0, 3, 4)] == whole[:3]


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
    for out, row, each in zip(outs, ROWS, [own.changes(), {"seed": 9}, {}, {}], strict=False):
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
    refuses(lambda: next(many), "the file is gone", OSError)
    assert [out.new_tokens[0].tolist() for out in many] == whole[:2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": "best"}, "unknown order: 'best'"),
        ({"look_ahead": -1}, "look_ahead=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": [1, 2]}, "give each prompt its own seed"),
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
def family(name: str) -> Any:
    return IMAGE_MODELS[name][0]()


class Hurt(LlamaGenModel):
    poison, error = -100, RuntimeError("unused")
    calls = itertools.count(1)
    last = 0

    def __call__(self, query: Any, store: Any = None) -> Tensor:
        if next(self.calls) == self.last:
            raise self.error
        found = super().__call__(query, store)
        return found.masked_fill((query.tokens == self.facts.vocab_size + self.poison).any(1).view(-1, 1, 1), torch.nan)


def hurt(model: LlamaGenModel, **how: Any) -> Hurt:
    wrapped = Hurt(model.module, model.vq)
    wrapped.calls = itertools.count(1)  # bound copies count on
    for name, value in how.items():
        setattr(wrapped, name, value)
    return wrapped


def assert_same_images(outs: list[ImageOutput], whole: ImageOutput, accepted: bool = True) -> None:
    assert [out.error for out in outs] == [None] * len(whole.tokens)
    for index, out in enumerate(outs):
        assert out.index == index and out.tokens.tolist() == whole.tokens[index : index + 1].tolist()
        assert out.row_nfe == [whole.row_nfe[index]] and out.draft_nfe == [whole.draft_nfe[index]]
        assert torch.equal(out.codes, whole.codes[index : index + 1])
        assert torch.allclose(out.images, whole.images[index : index + 1])
        if accepted:
            row = np.trim_zeros(whole.accepted[:, index], "b")
            assert np.trim_zeros(out.accepted[:, 0], "b").tolist() == row.tolist()


def generate_both_ways(
    model: Any, prompts: list[Any], batch_size: int = 2, **request: Any
) -> tuple[list[ImageOutput], ImageOutput]:
    output_type = "latent" if getattr(model, "vq", 0) is None else "pt"
    return list(
        generate_many(model, prompts, batch_size=batch_size, output_type=output_type, **request)
    ), generate_images(model, **{model.conditions: prompts, **request, "output_type": output_type})


@pytest.mark.thinned
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", ["sjd", "scd", "sjd_pac", "jacobi", "gsd", "lantern", "speculative"])
def test_autoregressive_pictures_are_those_of_the_whole_list(llamagen: LlamaGenModel, name: str, scale: float) -> None:
    settings = {"drafter": tiny_llamagen(seed=1)} if name == "speculative" else {"window": 5}
    sampler = samplers.create(name, **settings)
    assert_same_images(
        *generate_both_ways(llamagen, LABELS, sampler=sampler, guidance_scale=scale, temperature=0.9, seed=4)
    )


@pytest.mark.parametrize("name", [name for name in IMAGE_MODELS if not name.startswith("llamagen")])
def test_grids_and_prompts_of_every_family(name: str) -> None:
    request = dict(IMAGE_MODELS[name][1])
    prompts = [*request.pop("prompts"), *IMAGE_MODELS[name][1]["prompts"][::-1]]
    if "negative_prompt" in request:
        request["negative_prompt"] = request["negative_prompt"][0]
    assert_same_images(*generate_both_ways(family(name), prompts, batch_size=3, seed=1, guidance_scale=2.0, **request))


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_captions_move_with_their_rows(scale: float) -> None:
    assert_same_images(
        *generate_both_ways(
            family("llamagen-t2i"), CAPTIONS, batch_size=2, sampler="jacobi", guidance_scale=scale, seed=1
        )
    )


@pytest.mark.parametrize("name", ["maskgit", "recap", "halton", "threshold", "wino"])
def test_masked_pictures_are_those_of_the_whole_list(masked: MaskedImageModel, name: str) -> None:
    request = {"sampler": name, "guidance_scale": 2.0, "temperature": 1.0, "seed": 4}
    request |= {"steps": 4} if samplers.registry.get(name).uses_steps else {}
    outs, whole = generate_both_ways(masked, CLASSES, batch_size=3, **request)
    assert_same_images(outs, whole, accepted=name != "wino")  # wino remasks tokens
    assert all(out.accepted.sum() == outs[0].grid.length for out in outs)
    with pytest.raises(ValueError, match="not written in order"):
        outs[0].steps  # noqa: B018


def test_packaged_digits_as_pil() -> None:
    model = paradec.load("digits-ar", dtype="float64")
    outs = list(generate_many(model, range(3), batch_size=2, seed=0))
    whole = generate_images(model, class_labels=range(3), seed=0)
    for index, out in enumerate(outs):
        assert out.tokens.tolist() == whole.tokens[index : index + 1].tolist()
        assert out.images[0].tobytes() == whole.images[index].tobytes()
        assert out.steps.tolist() == whole.steps[index : index + 1].tolist()


def test_prompts_may_have_their_own_requests(llamagen: LlamaGenModel) -> None:
    own = Request(temperature=0.5, guidance_scale=2.0)
    prompts = [{"prompt": 3, "seed": 9, "id": "a"}, (1, own), {"prompt": 2, "sampler": "jacobi"}, torch.tensor(7), 3]
    changes = [{"seed": 9}, own.changes(), {"sampler": "jacobi"}, {}, {}]
    request = {"sampler": "sjd", "seed": 1, "top_k": 6, "output_type": "latent"}
    outs = list(generate_many(llamagen, prompts, batch_size=2, order="completed", **request))
    outs.sort(key=lambda out: out.index)
    assert outs[0].id == "a"
    for out, label, more in zip(outs, (3, 1, 2, 7, 3), changes, strict=True):
        alone = generate_images(llamagen, class_labels=label, **{**request, **more})
        assert out.tokens.tolist() == alone.tokens.tolist()


def test_negative_prompts_are_a_prompts_own() -> None:
    model, request = family("janus"), {"seed": 2, "guidance_scale": 3.0, "output_type": "latent"}
    prompts = [{"prompt": [1, 20, 9], "negative_prompt": [1, 7, 9]}, {"prompt": [1, 30, 9]}]
    outs = list(generate_many(model, prompts, negative_prompt=[1, 8, 8, 9], **request))
    against = [[1, 7, 9], [1, 8, 8, 9]]
    whole = generate_images(model, [entry["prompt"] for entry in prompts], negative_prompt=against, **request)
    assert [out.tokens[0].tolist() for out in outs] == whole.tokens.tolist()


def test_errors_end_only_their_image(llamagen: LlamaGenModel) -> None:
    model = hurt(llamagen, poison=8)
    request = {"seed": 4, "output_type": "pt"}
    bad = [10, "a cat", [1, 2], {"prompt": 1, "max_new_tokens": 3}, {"prompt": 1, "trace": True}, 8]
    outs = list(generate_many(model, [*LABELS[:2], *bad, *LABELS[2:]], batch_size=2, **request))
    said = ["class_labels=10 must be", "class_labels='a cat'", "2 rows", "max_new_tokens=3 has", "trace=True", "NaN"]
    for out, words in zip(outs[2:8], said, strict=True):
        assert words in str(out.error) and out.images is None and out.codes is None
    whole = generate_images(llamagen, class_labels=LABELS, **request)
    assert [out.tokens[0].tolist() for out in [*outs[:2], *outs[8:]]] == whole.tokens.tolist()
    refuses(lambda: next(generate_many(llamagen, [10], errors="raise")), "class_labels=10")


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_rows_that_give_way_to_memory_begin_anew(llamagen: LlamaGenModel, kind: str) -> None:
    if kind == "c2i":
        plain, prompts = llamagen, LABELS
    else:
        plain, prompts = family("llamagen-t2i"), CAPTIONS
    model = hurt(plain, last=4, error=torch.OutOfMemoryError("CUDA out of memory"))
    outs = list(generate_many(model, prompts, batch_size=4, seed=4, output_type="pt", sampler="jacobi"))
    given = {plain.conditions: prompts, "seed": 4, "output_type": "pt", "sampler": "jacobi"}
    assert_same_images(outs, generate_images(plain, **given))


def test_max_memory_says_how_many_rows_are_decoded(llamagen: LlamaGenModel) -> None:
    many = generate_many(llamagen, LABELS, batch_size=4, max_memory=2**40, seed=4, output_type="latent")
    next(many)
    row = max(group.row_bytes for group in many.batch._groups)
    many.close()
    many = generate_many(llamagen, LABELS, batch_size=4, max_memory=int(2.5 * row), seed=4, output_type="latent")
    occupied = [many.batch.occupied for _ in many]
    assert len(occupied) == 7 and max(occupied) <= 2


@pytest.mark.parametrize("kind", ["var", "lpd", "nar", "mar", "distilled", "distilled var"])
def test_rows_in_lock_step_are_refused_by_name(kind: str) -> None:
    refuses(
        lambda: generate_many(shared_model(kind), [1]), "end together.*: give it to paradec.generate_images", TypeError
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
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
def test_arguments_are_refused_before_anything_is_read(
    llamagen: LlamaGenModel, arguments: dict[str, Any], words: str
) -> None:
    prompts = iter(lambda: pytest.fail("read"), None)
    refuses(lambda: generate_many(**{"model": llamagen, "prompts": prompts} | arguments), words)


def test_captions_of_a_drafter_are_refused() -> None:
    model = family("llamagen-t2i")
    sampler = samplers.create("speculative", drafter=tiny_llamagen("t2i", seed=1))
    (out,) = generate_many(model, CAPTIONS[:1], sampler=sampler, output_type="latent")
    assert "at its start; use paradec.generate_images" in str(out.error)
