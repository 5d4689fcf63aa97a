"""The packaged masked transformer and diffusion transformer of digits: they load, they draw digits, and what must hold
of samplers holds on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scripts import load_script

import paradec
from paradec.api.images import ImageOutput
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.masked import MaskedImageModel
from paradec.models.images.pixel_dit import PixelDiTPipeline

DATA = Path(paradec.__file__).parent / "assets"
load_classifier = load_script("benchmarks/digit_quality.py").load_classifier
LABELS = [label % 10 for label in range(40)]


@pytest.fixture(scope="module")
def masked() -> MaskedImageModel:
    return paradec.load("digits-maskgit")


@pytest.fixture(scope="module")
def exact() -> MaskedImageModel:
    return paradec.load("digits-maskgit", dtype="float64")


@pytest.fixture(scope="module")
def pipe() -> PixelDiTPipeline:
    found = PixelDiTPipeline.digits()
    found.set_progress_bar_config(disable=True)
    return found


def make(model: MaskedImageModel, **request: Any) -> ImageOutput:
    settings = {"class_labels": [1, 2, 3], "steps": 6, "seed": 0, "output_type": "latent"}
    return paradec.generate_images(model, **(settings | request))


def right(images: torch.Tensor) -> float:
    """Share of pictures, of the first of LABELS, whose class the classifier sees."""
    with torch.no_grad():
        return float((load_classifier()(images).argmax(-1) == torch.tensor(LABELS[: len(images)])).float().mean())


def test_sizes() -> None:
    for name, file in (("digits-maskgit", "model"), ("digits-dit", "transformer/diffusion_pytorch_model")):
        file = DATA / name / f"{file}.safetensors"
        assert file.stat().st_size < 2.5e6
        with safe_open(file, "pt") as weights:
            assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.float16}


# ---- the masked transformer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["maskgit", "halton", "recap", "threshold"])
def test_masked_digits_are_digits(masked: MaskedImageModel, name: str) -> None:
    """Far from the tenth that chance gets right."""
    settings, steps = ({"threshold": 0.3}, None) if name == "threshold" else ({}, 4)
    sampler = paradec.samplers.create(name, **settings)
    out = make(masked, class_labels=LABELS[:20], sampler=sampler, output_type="pt", steps=steps)
    assert out.images.shape == (20, 1, 28, 28) and 0 <= out.images.min() and out.images.max() <= 1
    assert right(out.images) > 0.7


def test_recap_without_local_steps_is_maskgit(exact: MaskedImageModel) -> None:
    settings = {"schedule": "power", "choice_temperature": 5.5, "final_temperature": 0.65}
    maskgit = make(exact, sampler=paradec.samplers.create("maskgit", **settings))
    recap = make(exact, sampler=paradec.samplers.create("recap", local_steps=0), cache="recap")
    assert torch.equal(maskgit.codes, recap.codes)
    assert maskgit.forwarded_tokens == recap.forwarded_tokens == 2 * 3 * 6 * 50


def test_local_steps_read_their_targets_alone(masked: MaskedImageModel) -> None:
    out = make(masked, sampler="recap")  # "recap" is its cache by default
    read = [step.forwarded for step in out.trace.steps]
    assert all(row == [100] * 3 for row in read[::2]) and all(max(row) < 100 for row in read[1::2])  # two branches
    whole = make(masked, sampler="recap", cache="none")
    assert out.forwarded_tokens < whole.forwarded_tokens == 2 * 3 * 6 * 50


def test_generate_takes_the_same_model(exact: MaskedImageModel) -> None:
    """`paradec.generate` with the class token as its prompt is the same request."""
    direct = paradec.generate(
        exact,
        input_ids=[[exact.class_token(label)] for label in (1, 2, 3)],
        sampler="maskgit",
        steps=6,
        temperature=1.0,
        guidance_scale=exact.defaults["guidance_scale"],
        suppress_tokens=exact.suppressed,
        seed=0,
    )
    assert torch.equal(make(exact).tokens, direct.new_tokens)
    assert direct.new_tokens.max() < 256


def test_rows_and_steps(exact: MaskedImageModel) -> None:
    out = make(exact, num_images=2)
    assert out.codes.shape == (6, 7, 7) and len({tuple(row) for row in out.tokens.tolist()}) == 6
    assert torch.equal(make(exact, class_labels=2).tokens[0], out.tokens[2])
    assert out.accepted.shape == (6, 6) and (out.accepted.sum(0) == 49).all()
    for step in range(6):  # every code has the step that wrote it
        assert ((out.steps == step).sum((1, 2)) == out.accepted[step]).all()


@pytest.mark.parametrize("sampler", ["saber", ("wino", {"threshold": 0.1, "threshold_back": 0.5})], ids=str)
def test_what_is_taken_back_was_not_accepted(masked: MaskedImageModel, sampler: Any) -> None:
    """Counted on the canvas itself, before and after every commit."""
    canvases: list[torch.Tensor] = []

    def note(state: Any, commit: Any) -> None:
        canvases.append(state.canvas.clone())

    method = sampler if isinstance(sampler, str) else paradec.samplers.create(sampler[0], **sampler[1])
    out = make(masked, sampler=method, class_labels=[1, 2], callback=note, steps=None)
    first = canvases[0].clone()
    first[:, 1:] = masked.facts.mask_id
    written, back = [], 0
    for before, after in zip([first, *canvases], canvases, strict=False):
        written.append(((after != before) & (after != masked.facts.mask_id)).sum(1).tolist())
        back += int(((after != before) & (after == masked.facts.mask_id)).sum())
    assert back > 0 and out.accepted.tolist() == written


def test_requests_go_by_the_folder_s_defaults(exact: MaskedImageModel) -> None:
    stated = json.loads((DATA / "digits-maskgit" / "config.json").read_text())["defaults"]
    assert stated.items() <= exact.defaults.items()
    module, changed = exact.module, {"guidance_scale": 3.0, "temperature": 0.5, "steps": 3}
    found = make(MaskedImageModel(module, defaults=changed), steps=None).tokens
    assert torch.equal(found, make(exact, **changed).tokens)
    for name in changed:
        others = {key: value for key, value in changed.items() if key != name}
        assert not torch.equal(found, make(exact, **({"steps": None} | others)).tokens), name


def test_without_the_label_classes_are_chance(masked: MaskedImageModel) -> None:
    """With scale 0 the label is not looked at."""
    blind = make(masked, class_labels=LABELS, guidance_scale=0.0, steps=4, output_type="pt")
    assert right(blind.images) < 0.4


def test_an_early_end_has_no_pictures(masked: MaskedImageModel) -> None:
    out = make(masked, callback=lambda state, commit: True, output_type="pt")
    assert out.images is None and out.codes is None and (out.steps < 1).all() and (out.steps == -1).any()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"class_labels": 10}, "class_labels"),
        ({"class_labels": None}, "needs class_labels"),
        ({"class_labels": None, "prompts": "a three"}, "does not take prompts"),
        ({"height": 32}, "height=32 must be 28"),
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"sampler": "sjd", "steps": None}, "sjd"),
        ({"output_type": "gif"}, "output_type"),
        ({"steps": 0}, "steps"),
        ({"top_k": -1}, "top_k"),
        ({"cache": "recap", "sampler": "maskgit"}, "recap"),
    ],
)
def test_bad_requests(masked: MaskedImageModel, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(masked, **request_)


def test_masked_arguments_are_refused_by_other_models() -> None:
    model = paradec.load("digits-ar")
    for name, value in (("steps", 8), ("cache", "recap")):
        with pytest.raises(ValueError, match=name):
            paradec.generate_images(model, class_labels=1, **{name: value})


def test_a_broken_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DATA / "digits-maskgit", folder)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"heads": 3}, "heads=3 must divide"),
        ({"defaults": {"stepz": 1}}, "stepz"),
        ({"heads": None}, "heads"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=message):
            paradec.load(folder)
    (folder / "config.json").write_text(json.dumps(config))  # its VQ is not beside it
    with pytest.raises(ValueError, match="no VQ decoder"):
        make(paradec.load(folder), output_type="pt")
    images = make(paradec.load(folder, vq=DATA / "digits" / "vq.safetensors"), output_type="pt").images
    assert images.shape == (3, 1, 28, 28)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no file"):
        paradec.load(folder)


# ---- the diffusion transformer --------------------------------------------------------------------------------------


def paint(pipe: PixelDiTPipeline, **request: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    settings = {"class_labels": LABELS[:4], "num_inference_steps": 8, "generator": draw, "output_type": "pt"}
    return pipe(**(settings | request)).images


def test_dit_digits_are_digits(pipe: PixelDiTPipeline) -> None:
    assert right(paint(pipe, class_labels=LABELS, num_inference_steps=10)) > 0.9


def test_plain_diffusers_loads_its_parts() -> None:
    from diffusers import DDIMScheduler, DiTTransformer2DModel

    folder = DATA / "digits-dit"
    transformer = DiTTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    scheduler = DDIMScheduler.from_pretrained(folder, subfolder="scheduler")
    assert transformer.dtype == torch.float32 and scheduler.config.prediction_type == "v_prediction"


def test_saved_and_loaded_again(pipe: PixelDiTPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    again = PixelDiTPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(paint(pipe), paint(again))


def test_the_pipeline_is_the_forecast_family_s_loop(pipe: PixelDiTPipeline) -> None:
    from paradec.core.protocol import decode
    from paradec.models.images.diffusion import DiffusionModel

    noise = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    sampler = paradec.TaylorSeer(interval=3, order=1)
    model = DiffusionModel(pipe.transformer.eval())
    state = sampler.start(
        model, noise, scheduler=pipe.scheduler, num_inference_steps=8, guidance_scale=2.0, class_labels=LABELS[:4]
    )
    with torch.no_grad():
        decode(sampler, model, state)
    with paradec.accelerate(pipe, paradec.TaylorSeer(interval=3, order=1, target="output")):
        images = paint(pipe, latents=noise)
    assert torch.allclose(images, (state.latent / 2 + 0.5).clamp(0, 1), atol=1e-4)


def test_interval_one_is_the_pipeline(pipe: PixelDiTPipeline) -> None:
    plain = paint(pipe)
    for target in ("module", "block", "output"):
        with paradec.accelerate(pipe, paradec.TaylorSeer(interval=1, target=target)) as session:
            assert torch.equal(paint(pipe), plain)
        assert session.report().full_steps == list(range(8))
    with paradec.accelerate(pipe, paradec.TaylorSeer(interval=3, order=1)) as session:
        fast = paint(pipe)
    assert session.report().full_steps == [0, 3, 6] and not torch.equal(fast, plain)
    assert (fast - plain).abs().mean() < 0.05
    assert torch.equal(paint(pipe), plain)


def test_pipeline_requests(pipe: PixelDiTPipeline) -> None:
    assert np.array_equal(paint(pipe, output_type="np"), paint(pipe).permute(0, 2, 3, 1).numpy())
    (image,) = paint(pipe, class_labels=7, output_type="pil", num_inference_steps=1)
    assert image.size == (28, 28) and image.mode == "L"
    for request, message in (
        ({"class_labels": 10}, "class_labels"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"output_type": "latent"}, "output_type"),
        ({"latents": torch.zeros(1, 1, 28, 28)}, "latents have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            paint(pipe, **request)


def test_digits_by_other_schedulers(pipe: PixelDiTPipeline) -> None:
    """One whose first noise is not of unit scale, and one that draws noise at every step, from the request's
    generator."""
    from diffusers import DDPMScheduler, EulerDiscreteScheduler

    euler, ddpm = (
        PixelDiTPipeline(pipe.transformer, scheduler.from_config(pipe.scheduler.config))
        for scheduler in (EulerDiscreteScheduler, DDPMScheduler)
    )
    for other in (euler, ddpm):
        other.set_progress_bar_config(disable=True)
    # the same noise gives the same pictures by another solver
    noise = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    ours, theirs = (paint(other, class_labels=[1, 2], latents=noise, num_inference_steps=12) for other in (pipe, euler))
    assert euler.scheduler.init_noise_sigma > 2 and (ours - theirs).abs().max() < 0.05
    first, again = (paint(ddpm, class_labels=3, num_inference_steps=3) for _ in range(2))
    assert torch.equal(first, again)
