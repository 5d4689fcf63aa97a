"""`generate_many` over image models: each picture is that of `generate_images` on the whole list."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from every_model import shared
from image_families import MODELS
from image_models import tiny_llamagen, tiny_masked_image
from torch import Tensor

import paradec
from paradec import Interrupted, Request, generate_images, generate_many, samplers
from paradec.api.images import ImageOutput
from paradec.batching.slots import Cancelled
from paradec.models.images.llamagen import LlamaGenModel
from paradec.models.images.uvit import MaskedImageModel

LABELS = [3, 9, 1, 3, 3, 7, 0]
CLASSES = [3, 1, 1, 0, 2]
CAPTIONS = [torch.linspace(-1, 1, length * 16).double().view(length, 16).roll(length) for length in (5, 2, 6, 1, 2)]
pytestmark = pytest.mark.filterwarnings("ignore:steps=")


@pytest.fixture(scope="module")
def llamagen() -> LlamaGenModel:
    return tiny_llamagen()


@pytest.fixture(scope="module")
def masked() -> MaskedImageModel:
    return tiny_masked_image()


@lru_cache
def family(name: str) -> Any:
    return MODELS[name][0]()


class Hurt(LlamaGenModel):
    """Fails for the class of one label, or once it has been called so often."""

    poison, error = -100, RuntimeError("unused")
    calls = itertools.count(1)
    last = 0

    def __call__(self, query: Any, store: Any = None) -> Tensor:
        if next(self.calls) == self.last:
            raise self.error
        found = super().__call__(query, store)
        hurt = (query.tokens == self.facts.vocab_size + self.poison).any(1)
        return found.masked_fill(hurt.view(-1, 1, 1), torch.nan)


def hurt(model: LlamaGenModel, **how: Any) -> Hurt:
    wrapped = Hurt(model.module, model.vq)
    wrapped.calls = itertools.count(1)  # bound copies count on
    for name, value in how.items():
        setattr(wrapped, name, value)
    return wrapped


def same(outs: list[ImageOutput], whole: ImageOutput, accepted: bool = True) -> None:
    """Tokens, forwards and pictures are those of the whole list."""
    assert [out.error for out in outs] == [None] * len(whole.tokens)
    for index, out in enumerate(outs):
        assert out.index == index and out.tokens.tolist() == whole.tokens[index : index + 1].tolist()
        assert out.row_nfe == [whole.row_nfe[index]] and out.draft_nfe == [whole.draft_nfe[index]]
        assert torch.equal(out.codes, whole.codes[index : index + 1])
        assert torch.allclose(out.images, whole.images[index : index + 1])
        if accepted:
            row = np.trim_zeros(whole.accepted[:, index], "b")
            assert np.trim_zeros(out.accepted[:, 0], "b").tolist() == row.tolist()


def both(model: Any, prompts: list[Any], batch_size: int = 2, **request: Any) -> tuple[list[ImageOutput], ImageOutput]:
    output_type = "latent" if getattr(model, "vq", 0) is None else "pt"
    given = {model.conditions: prompts, **request, "output_type": output_type}
    return list(
        generate_many(model, prompts, batch_size=batch_size, output_type=output_type, **request)
    ), generate_images(model, **given)


@pytest.mark.thinned
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", ["sjd", "scd", "sjd_pac", "jacobi", "gsd", "lantern", "speculative"])
def test_autoregressive_pictures_are_those_of_the_whole_list(llamagen: LlamaGenModel, name: str, scale: float) -> None:
    settings = {"drafter": tiny_llamagen(seed=1)} if name == "speculative" else {"window": 5}
    sampler = samplers.create(name, **settings)
    same(*both(llamagen, LABELS, sampler=sampler, guidance_scale=scale, temperature=0.9, seed=4))


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("llamagen")])
def test_grids_and_prompts_of_every_family(name: str) -> None:
    request = dict(MODELS[name][1])
    prompts = [*request.pop("prompts"), *MODELS[name][1]["prompts"][::-1]]
    if "negative_prompt" in request:
        request["negative_prompt"] = request["negative_prompt"][0]
    same(*both(family(name), prompts, batch_size=3, seed=1, guidance_scale=2.0, **request))


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_captions_move_with_their_rows(scale: float) -> None:
    same(*both(family("llamagen-t2i"), CAPTIONS, batch_size=2, sampler="jacobi", guidance_scale=scale, seed=1))


@pytest.mark.parametrize("name", ["maskgit", "recap", "halton", "threshold", "wino"])
def test_masked_pictures_are_those_of_the_whole_list(masked: MaskedImageModel, name: str) -> None:
    request = {"sampler": name, "guidance_scale": 2.0, "temperature": 1.0, "seed": 4}
    request |= {"steps": 4} if samplers.registry.get(name).uses_steps else {}
    outs, whole = both(masked, CLASSES, batch_size=3, **request)
    same(outs, whole, accepted=name != "wino")  # which takes tokens back
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


def test_a_prompt_may_say_more(llamagen: LlamaGenModel) -> None:
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


def test_no_more_is_read_than_fits(masked: MaskedImageModel) -> None:
    read = itertools.count()

    def endless() -> Iterator[int]:
        while True:
            yield next(read) % 4

    with generate_many(masked, endless(), batch_size=2, look_ahead=1, steps=2, output_type="latent") as many:
        assert [out.index for out in itertools.islice(many, 5)] == [0, 1, 2, 3, 4]
    assert next(read) <= 5 + 3


def test_what_fails_fails_alone(llamagen: LlamaGenModel) -> None:
    model = hurt(llamagen, poison=8)
    request = {"seed": 4, "output_type": "pt"}
    bad = [10, "a cat", [1, 2], {"prompt": 1, "max_new_tokens": 3}, {"prompt": 1, "trace": True}, 8]
    outs = list(generate_many(model, [*LABELS[:2], *bad, *LABELS[2:]], batch_size=2, **request))
    said = ["class_labels=10 must be", "class_labels='a cat'", "2 rows", "max_new_tokens=3 has", "trace=True", "NaN"]
    for out, words in zip(outs[2:8], said, strict=True):
        assert words in str(out.error) and out.images is None and out.codes is None
    whole = generate_images(llamagen, class_labels=LABELS, **request)
    good = [*outs[:2], *outs[8:]]
    assert [out.tokens[0].tolist() for out in good] == whole.tokens.tolist()
    with pytest.raises(ValueError, match="class_labels=10"):
        next(generate_many(llamagen, [10], errors="raise"))


def test_pictures_are_taken_back(llamagen: LlamaGenModel) -> None:
    many = generate_many(llamagen, LABELS, batch_size=2, seed=4, output_type="latent")
    assert many.cancel(1) and many.cancel(5)
    outs = list(many)
    assert [isinstance(out.error, Cancelled) for out in outs] == [index in (1, 5) for index in range(7)]
    whole = generate_images(llamagen, class_labels=LABELS, seed=4, output_type="latent")
    assert outs[6].tokens.tolist() == whole.tokens[6:].tolist()
    many.batch.close()


def test_nothing_is_lost_by_an_interrupt(llamagen: LlamaGenModel) -> None:
    model = hurt(llamagen, last=20, error=KeyboardInterrupt())
    request = {"batch_size": 3, "seed": 4, "order": "completed", "output_type": "pt"}
    many, outs = generate_many(model, LABELS, **request), []
    with pytest.raises(Interrupted):
        for out in many:
            outs.append(out)
    outs += many
    outs.sort(key=lambda out: out.index)
    same(outs, generate_images(llamagen, class_labels=LABELS, seed=4, output_type="pt"))


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
def test_rows_that_give_way_to_memory_begin_anew(llamagen: LlamaGenModel, kind: str) -> None:
    if kind == "c2i":
        plain, prompts = llamagen, LABELS
    else:
        plain, prompts = family("llamagen-t2i"), CAPTIONS
    model = hurt(plain, last=4, error=torch.OutOfMemoryError("CUDA out of memory"))
    outs = list(generate_many(model, prompts, batch_size=4, seed=4, output_type="pt", sampler="jacobi"))
    given = {plain.conditions: prompts, "seed": 4, "output_type": "pt", "sampler": "jacobi"}
    same(outs, generate_images(plain, **given))


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
    with pytest.raises(TypeError, match="end together.*: give it to paradec.generate_images"):
        generate_many(shared(kind), [1])


@pytest.mark.parametrize(
    "arguments",
    [
        ({"sampler": "zipar"}, "'zipar' .* end together; use paradec.generate_images"),
        ({"sampler": "maskgit"}, "maskgit"),
        ({"max_new_tokens": 4}, "max_new_tokens=4 has no meaning for pictures"),
        ({"trace": True}, "trace=True does not work"),
        ({"generator": torch.Generator()}, "generator=.* does not work"),
        ({"seed": (1, 2)}, "must be one int here"),
        ({"height": 32}, "height=32"),
    ],
)
def test_arguments_are_refused_before_anything_is_read(llamagen: LlamaGenModel, arguments: Any) -> None:
    given, words = arguments
    with pytest.raises(ValueError, match=words):
        generate_many(llamagen, iter(lambda: pytest.fail("read"), None), **given)


def test_pictures_need_a_decoder_and_texts_none() -> None:
    with pytest.raises(ValueError, match="has no VQ decoder"):
        generate_many(tiny_llamagen(vq=False), [1])
    with pytest.raises(ValueError, match="height=32 is for image models"):
        generate_many(shared("llada"), [[1]], height=32)


def test_captions_of_a_drafter_are_refused() -> None:
    model = family("llamagen-t2i")
    sampler = samplers.create("speculative", drafter=tiny_llamagen("t2i", seed=1))
    (out,) = generate_many(model, CAPTIONS[:1], sampler=sampler, output_type="latent")
    assert "rows that begin together; use paradec.generate_images" in str(out.error)
