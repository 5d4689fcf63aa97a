"""`generate_images` with every family and with custom models; errors of wrong requests."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from images import FAMILIES as TINY
from images import tiny_llamagen, tiny_mar, tiny_masked_image, tiny_var
from PIL import Image
from torch import Tensor

import paradec
from paradec import samplers
from paradec.api import images
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import LatentProposal
from paradec.core.memory import Memory
from paradec.core.protocol import Commit, Sampler, State
from paradec.core.query import Cost, Query
from paradec.models.images import llamagen, lpd, mar
from paradec.models.images.base import ImageRequest, PictureModel, Snapshot, list_labels, picture_tokens
from paradec.models.images.grid import Grid
from paradec.models.images.loading import FAMILIES, image_adapter
from paradec.request import DEFAULTS, Request, request_for


class Tiles(PictureModel):
    """A masked model without a network: 3 x 3 cells of 4 shades. Every class has a likeliest shade."""

    makes, family, default_sampler = "masked image", "masked", "maskgit"
    defaults = {"steps": 3, "temperature": 1.0}
    facts = ModelFacts(vocab_size=9, mask_token_id=4, name="tiles")
    device, tokenizer, pads, supports_store, supports_visibility = torch.device("cpu"), None, True, False, False
    default_block_length = None

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return Grid(3, 3, range(4))

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        return ImageRequest(self, [[5 + label] for label in list_labels(given, 4) for _ in range(num_images)])

    def begin(self, sampler: Any, image: ImageRequest, grid: Grid, request: Any) -> Any:
        arguments = {"max_new_tokens": grid.length, "suppress_tokens": range(5, 9)}
        return sampler.start(self, image.prompts, replace(request, **arguments))

    def read(self, state: Any, grid: Grid) -> Snapshot:
        tokens, accepted = picture_tokens(state, grid), np.zeros((state.commits, state.batch))
        return Snapshot(tokens, state.done, accepted, [1] * 2, [0] * state.batch)

    def decode(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.codes(tokens).unsqueeze(1) / 3

    def __call__(self, query: Query) -> Tensor:
        likeliest = torch.nn.functional.one_hot(query.tokens[:, :1] - 5, 9).double()
        return 1.5 * likeliest.expand(-1, query.wanted.shape[1], -1)


def test_a_custom_masked_model_generates_images() -> None:
    def paint(**request: Any) -> images.ImageOutput:
        return paradec.generate_images(Tiles(), class_labels=[2, 0], seed=2, **request)

    cold = paint(temperature=0, output_type="pt")
    assert torch.equal(cold.images, torch.tensor([2 / 3, 0.0]).view(2, 1, 1, 1).expand(2, 1, 3, 3))
    assert cold.row_nfe == [3, 3] and cold.codes.unique().tolist() == [0, 2]  # the model's default steps
    drawn = paint(output_type="latent")
    assert torch.equal(drawn.images, drawn.codes) and len(drawn.codes.unique()) > 2  # the model's default temperature
    assert torch.equal(paint(output_type="latent", sampler="halton", steps=9).codes[0] < 4, torch.ones(3, 3).bool())
    assert [image.size for image in paint().images] == [(3, 3)] * 2 and isinstance(paint().images[0], Image.Image)
    assert paint(callback=lambda state, commit: True).images is None
    refuses(lambda: paint(sampler="sjd"), "'sjd' is of family 'draft_verify'; tiles takes the 'masked' family")
    refuses(lambda: paint(prompts="a cat"), "tiles does not take prompts; it is conditioned on class_labels")


@dataclass
class SweepState(State):
    shades: Tensor
    picture: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.picture = torch.zeros(self.batch, 4, 4)

    done = property(lambda self: self.commits == 4)


@dataclass(frozen=True)
class Sweep(Sampler):
    gain: float = 1.0

    name, family, models = "sweep", "sweeps", ("swept picture",)
    unsupported = ("cache", "top_k", "top_p", "steps")

    def start(self, model: Any, prompt: Any, request: Request | None = None, **arguments: Any) -> SweepState:
        self.check_model(model)
        request_for(self, request, arguments)
        shades = torch.tensor(prompt)
        return SweepState(batch=len(shades), memory=Memory(), shades=shades)

    def query(self, state: Any) -> list[Any]:
        return [Query(np.arange(state.batch), state.shades, state.shades, forwarded=np.full(state.batch, 4))]

    def propose(self, state: Any, outputs: list[Any], queries: list[Any]) -> LatentProposal:
        return LatentProposal(queries[0].rows, outputs[0] * self.gain, Cost(queries, state.batch), state.commits)

    def commit(self, state: Any, proposal: Any) -> Commit:
        state.check_current(proposal)
        state.picture[:, state.commits] = proposal.values.unsqueeze(1)
        state.count(proposal.cost)
        state.commits += 1
        return Commit(proposal.rows, proposal.values)


class Swept(PictureModel):
    makes, family, default_sampler, conditions = "swept picture", "sweeps", "sweep", "prompts"
    sampler_settings = ("temperature",)
    facts, device = ModelFacts(vocab_size=1, name="swept"), torch.device("cpu")

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return Grid(4, 4, range(1))

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        return ImageRequest(self, [shade for shade in given for _ in range(num_images)])

    def read(self, state: Any, grid: Grid) -> Snapshot:
        accepted, nothing = np.full((state.commits, state.batch), 4), [0] * state.batch
        return Snapshot(state.picture.flatten(1).unsqueeze(-1), state.done, accepted, nothing, nothing)

    def latent(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens.unflatten(1, (4, 4)).permute(0, 3, 1, 2)

    decode = latent

    def __call__(self, query: Any) -> Tensor:
        return query.tokens / 2


def test_a_custom_family_generates_images() -> None:
    request = {"num_images": 2, "guidance_scale": 1.5, "output_type": "pt"}
    out = paradec.generate_images(Swept(), [0.5, 1.0], sampler=Sweep(gain=2.0), **request)
    assert torch.equal(out.images, torch.tensor([0.5, 0.5, 1.0, 1.0]).view(4, 1, 1, 1).expand(4, 1, 4, 4))
    assert out.codes is None and out.row_nfe == [4] * 4 and out.forwarded_tokens == 64 and out.tokens_per_forward == 4
    refuses(lambda: paradec.generate_images(Swept(), [0.5], sampler=Sweep(), top_k=3), "top_k=3 has no meaning")
    refuses(lambda: paradec.generate_images(Swept(), [0.5], sampler="maskgit"), "'maskgit' is of family 'masked'")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_list_samplers_that_work(model_type: str) -> None:
    kind = image_adapter(model_type)
    assert issubclass(kind, PictureModel)
    for name, preset in (("", None), *kind.sampler_names.items()):
        sampler = images.picture_sampler(kind, name or None, "it")
        assert sampler.family == kind.family and kind.makes in sampler.models
        if preset is not None:
            assert (sampler.name, preset[1] in sampler.presets) == (preset[0], True)
    for family, name in {samplers.get(name).family: name for name in ("sjd", "maskgit", "mar", "taylorseer")}.items():
        if family != kind.family:
            message = f"'{name}' is of family '{family}'; .* takes the '{kind.family}' family"
            refuses(partial(images.picture_sampler, kind, name, "it"), message)


RECAP = samplers.create("mar", preset="recap", head_steps=3)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "image": (tiny_llamagen, {"sampler": samplers.create("sjd", window=4), "temperature": 0.7, "top_k": 9}),
    "masked image": (tiny_masked_image, {"sampler": "recap", "steps": 4, "temperature": 0.8, "top_p": 0.9}),
    "scale image": (tiny_var, {"sampler": samplers.create("var", smooth=True), "temperature": 0.8, "top_k": 9}),
    "continuous image": (tiny_mar, {"sampler": RECAP, "steps": 4, "temperature": 0.5}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    make, arguments = CASES[request.param]
    return make(), arguments | {"guidance_scale": 1.5, "seed": 3, "trace": True}


def paint(model: Any, **request: Any) -> images.ImageOutput:
    return paradec.generate_images(model, class_labels=[1, 2], output_type="latent", **request)


def assert_equal_outputs(a: images.ImageOutput, b: images.ImageOutput) -> None:
    assert torch.equal(a.tokens, b.tokens) and a.trace.settings == b.trace.settings
    assert (a.row_nfe, a.forwarded_tokens) == (b.row_nfe, b.forwarded_tokens)


@pytest.mark.thinned
def test_presets_give_the_same_pictures_as_their_arguments(case: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    model, arguments = case
    expected, preset = paint(model, **arguments), Request(**arguments)
    preset.save(tmp_path / "mine.json")
    data = json.loads((tmp_path / "mine.json").read_text())
    for source in (preset, tmp_path / "mine.json", str(tmp_path / "mine.json"), data):
        assert_equal_outputs(paint(model, preset=source), expected)
    assert_equal_outputs(paint(model, preset=preset, seed=4, temperature=None), paint(model, **arguments | {"seed": 4}))
    unguided = paint(model, **arguments | {"guidance_scale": 1})
    assert_equal_outputs(paint(model, preset=preset, guidance_scale=1), unguided)
    assert unguided.forwarded_tokens < expected.forwarded_tokens


@pytest.mark.thinned
def test_saved_requests_load_unchanged(case: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    model, arguments = case
    for fields in ({"seed": 3}, arguments):
        request = images.picture_request(model, fields)
        request.save(tmp_path / "mine.json")
        assert Request.load(tmp_path / "mine.json") == request
        assert images.picture_request(model, {}, tmp_path / "mine.json") == request
        for name in {*model.defaults} - {*fields}:
            assert getattr(request, name) == (model.defaults[name] or DEFAULTS[name])
    assert_equal_outputs(paint(model, preset=tmp_path / "mine.json"), paint(model, **arguments))


def test_presets_use_the_model_names_of_samplers() -> None:
    for preset in (Request(sampler="recap"), {"sampler": "recap"}):
        assert images.picture_request(tiny_mar(), {}, preset).sampler == samplers.create("mar", preset="recap")
        request = images.picture_request(tiny_masked_image(), {}, preset)
        assert request.sampler == samplers.create("recap") and request.cache == "recap"
    with pytest.raises(ValueError, match="'recap' with settings is of family 'masked'; for MAR .* write 'recap' alone"):
        images.picture_request(tiny_mar(), {}, {"sampler": samplers.create("recap").to_dict()})


def test_a_zero_in_a_preset_s_mapping_counts() -> None:
    """`Request.save` omits temperature 0, the default of text models, but an explicit 0 in a mapping is used."""
    model = tiny_llamagen()
    cold = paint(model, temperature=0, top_k=0, seed=1)
    assert torch.equal(paint(model, preset={"temperature": 0.0, "top_k": None}, seed=2).tokens, cold.tokens)
    assert images.picture_request(model, {}, {"guidance_scale": 1.0}).guidance_scale == 1.0
    assert images.picture_request(model, {}, Request()).guidance_scale == model.defaults["guidance_scale"] == 4.0


def test_steps_are_for_samplers_with_a_schedule() -> None:
    model = Tiles()
    assert images.picture_request(model, {}).steps == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert images.picture_request(model, {"sampler": "threshold"}).steps is None
    with pytest.warns(UserWarning, match="steps=4 has no effect: sampler 'threshold' has no schedule") as warned:
        paradec.generate_images(model, class_labels=[1, 2], sampler="threshold", steps=4, output_type="latent")
    assert warned[0].filename == __file__


MILLIONS = {
    "lpd": {"lpd_l": 337, "lpd_xl": 752, "lpd_xxl": 1400},
    "mar": {"mar_base": 208, "mar_large": 479, "mar_huge": 943},
    "llamagen": {"B": 111, "L": 343, "XL": 775, "XXL": 1400, "3B": 3100},
}


@pytest.mark.thinned
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, sizes in MILLIONS.items() for name in sizes])
def test_presets_have_the_published_sizes(family: str, name: str) -> None:
    with torch.device("meta"):
        if family == "lpd":
            module = lpd.LPD(lpd.LPDConfig(**lpd.PRESETS[name]))
        elif family == "mar":
            module = mar.MAR(**mar.PRESETS[name])
        else:
            module = llamagen.LlamaGen(llamagen.LlamaGenConfig(**llamagen.PRESETS[name]))
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(MILLIONS[family][name], rel=0.01)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["nar", "lpd", "masked image"])
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    model, request = TINY[name](), {"output_type": "latent", "guidance_scale": 2.0}
    both = paradec.generate_images(model, class_labels=[1, 2], seed=[4, 5], **request)
    for row, label in enumerate((1, 2)):
        alone = paradec.generate_images(model, class_labels=label, seed=4 + row, **request)
        torch.testing.assert_close(alone.tokens[0], both.tokens[row], atol=1e-9, rtol=1e-9)
    reseeded = paradec.generate_images(model, class_labels=[1, 2], seed=[4, 6], **request)
    assert torch.equal(reseeded.tokens[0], both.tokens[0]) and not torch.equal(reseeded.tokens[1], both.tokens[1])


REQUESTS: dict[str, dict[str, Any]] = {
    "glm_image": {"prompts": [[100, 64]], "height": 64, "width": 64},
    "janus": {"prompts": [[1, 9]]},
    "emu3": {"prompts": [[1, 9]], "height": 24, "width": 24, "negative_prompt": [[1]]},
}
WRONG: dict[str, list[dict[str, Any]]] = {
    "glm_image": [
        *({"height": 100}, {"guidance_scale": 2.0}, {"output_type": "pt"}, {"prompts": [[160, 64]]}),
        *({"prompts": "a fox"}, {"prompts": [[64, 1, 2, 65, 100, 64]]}),
    ],
    "janus": [{"prompts": "a cat"}, {"height": 16}, {"prompts": [[1, 64]]}, {"negative_prompt": [[1]] * 3}],
    "emu3": [{"negative_prompt": None}, {"class_labels": 1}],
    "llamagen": [
        *({"height": 16}, {"height": True}, {"width": 7}, {"class_labels": 10}, {"class_labels": []}),
        *({"num_images": 0}, {"class_labels": None}, {"sampler": "threshold"}, {"chat": True}, {"top_k": -1}),
        *({"prompts": "a cat", "class_labels": None}, {"guidance_scale": -1}, {"output_type": "np"}),
        *({"negative_prompt": "x"}, {"max_new_tokens": 4}),
    ],
    "lpd": [{"class_labels": [5]}, {"class_labels": []}, {"height": 9}, {"height": 16}, {"sampler": "sjd"}],
    "mar": [{"class_labels": None}, {"class_labels": [10]}, {"class_labels": []}, {"height": 16}, {"steps": 17}],
    "nar": [{"guidance_scale": -1}, {"height": 32}, {"top_p": 0.0}, {"sampler": "sjd"}],
}


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, changes in WRONG.items() for wrong in changes])
def test_wrong_arguments_are_named(name: str, wrong: dict[str, Any]) -> None:
    request = REQUESTS.get(name, {"class_labels": [1]})
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        paradec.generate_images(TINY[name](), **{"output_type": "latent"} | request | wrong)
