"""`generate_images` and `paradec image`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from images import greedy, tiny_llamagen
from PIL import Image
from places import load_script
from typer.testing import CliRunner

import paradec
from paradec.api.images import ImageOutput, contact_sheet
from paradec.cli import app
from paradec.models.images.llamagen import LlamaGenModel
from paradec.samplers.causal.sjd import SJD

RUNNER = CliRunner()
digit_quality = load_script("benchmarks/digit_quality.py")
frechet_distance, moments = digit_quality.frechet_distance, digit_quality.moments
load_classifier = digit_quality.load_classifier


@pytest.fixture(scope="module")
def tiny() -> LlamaGenModel:
    return tiny_llamagen()


def paint(model: LlamaGenModel, **request: Any) -> ImageOutput:
    settings = {"class_labels": [1, 2, 3], "seed": 0, "output_type": "latent", "sampler": SJD(window=4)}
    return paradec.generate_images(model, **(settings | request))


def test_output_types(tiny: LlamaGenModel) -> None:
    latent, pt, pil = (paint(tiny, output_type=kind) for kind in ("latent", "pt", "pil"))
    assert torch.equal(latent.images, latent.codes) and latent.codes.shape == (3, 4, 4)
    assert pt.images.shape == (3, 3, 8, 8) and pt.images.dtype == torch.float32
    assert 0 <= pt.images.min() and pt.images.max() <= 1
    assert torch.equal(pt.images, tiny.decode(latent.tokens, latent.grid))
    assert [image.size for image in pil.images] == [(8, 8)] * 3 and pil.images[0].mode == "RGB"
    assert np.abs(np.asarray(pil.images[1]) / 255 - pt.images[1].permute(1, 2, 0).numpy()).max() <= 0.5 / 255 + 1e-6


def test_counts_of_forwards_and_tokens(tiny: LlamaGenModel) -> None:
    guided, plain = paint(tiny), paint(tiny, guidance_scale=1)
    for out, branches in ((guided, 2), (plain, 1)):
        assert out.accepted.shape[1] == 3 and (out.accepted.sum(0) == 16).all()
        assert out.row_nfe == (out.accepted > 0).sum(0).tolist() and out.nfe == max(out.row_nfe) == len(out.accepted)
        assert out.row_forwards == branches * sum(out.row_nfe)
        assert out.tokens_per_forward == 48 / sum(out.row_nfe) > 1
    one_by_one = paint(tiny, sampler=SJD(window=1))
    assert one_by_one.row_nfe == [16] * 3 and one_by_one.forwarded_tokens == 2 * 3 * 16


def test_rows_are_independent(tiny: LlamaGenModel) -> None:
    together = paint(tiny)
    for row, label in enumerate([1, 2, 3]):
        assert torch.equal(paint(tiny, class_labels=label).tokens[0], together.tokens[row])


def test_several_pictures_of_one_class_differ(tiny: LlamaGenModel) -> None:
    out = paint(tiny, class_labels=[5, 6], num_images=3)
    assert len({tuple(row) for row in out.tokens.tolist()}) == 6
    assert torch.equal(out.tokens, paint(tiny, class_labels=[5, 5, 5, 6, 6, 6]).tokens)


def test_defaults_come_from_the_model(tiny: LlamaGenModel) -> None:
    assert torch.equal(paint(tiny).tokens, paint(tiny, guidance_scale=4.0, temperature=1.0, top_k=0).tokens)
    assert torch.equal(paint(tiny, top_k=1).tokens, greedy(tiny.request([1, 2, 3], tiny.grid()), tiny.grid(), 4.0))


def test_steps_agree_with_the_trace(tiny: LlamaGenModel) -> None:
    out = paint(tiny, trace=True)
    from_trace = out.steps
    out.recorded_trace = None
    assert np.array_equal(out.steps, from_trace)
    for row in range(3):
        assert np.array_equal(np.bincount(from_trace[row].ravel()), out.accepted[: out.row_nfe[row], row])
    assert (np.diff(from_trace.reshape(3, -1)) >= 0).all()


def test_contact_sheet() -> None:
    pictures = [Image.new("L", (4, 3), shade) for shade in (10, 20, 30)]
    sheet = np.asarray(contact_sheet(pictures, columns=2, gap=1, enlarge=2))
    assert sheet.shape == (2 * 6 + 1, 2 * 8 + 1)
    assert (sheet[:6, :8] == 10).all() and (sheet[:6, 9:] == 20).all() and (sheet[7:, :8] == 30).all()
    assert (sheet[6] == 255).all() and (sheet[7:, 9:] == 255).all()
    refuses(lambda: contact_sheet([]), "images is empty")
    refuses(lambda: contact_sheet(pictures, columns=0), "columns=0 must be an integer from 1")


def test_a_callback_can_end_decoding(tiny: LlamaGenModel) -> None:
    out = paint(tiny, callback=lambda state, commit: state.commits == 2)
    assert out.images is None and out.codes is None and len(out.accepted) == 2
    assert ((out.steps >= 0).sum((1, 2)) == out.accepted.sum(0)).all()


def test_an_interrupt_returns_the_accepted_codes(tiny: LlamaGenModel) -> None:
    def callback(state: Any, commit: Any) -> None:
        if state.commits == 3:
            raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paint(tiny, callback=callback)
    out, full = caught.value.output, paint(tiny)
    assert out.images is None and len(out.accepted) == 3
    assert out.tokens_per_forward == out.accepted.sum() / sum(out.row_nfe)  # accepted tokens only
    assert full.tokens_per_forward == full.tokens.numel() / sum(full.row_nfe)
    for row, count in enumerate(out.accepted.sum(0)):
        assert torch.equal(out.tokens[row, :count], full.tokens[row, :count])


def test_missing_pillow_is_reported_before_decoding(tiny: LlamaGenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        paint(tiny, output_type="pil", callback=lambda *_: pytest.fail("decoding began"))
    assert paint(tiny, output_type="pt").images.shape == (3, 3, 8, 8)


def test_models_without_a_decoder_return_codes() -> None:
    model = tiny_llamagen(vq=False)
    refuses(lambda: paint(model, output_type="pt"), "has no VQ decoder; load it with vq=")
    assert paint(model).images.shape == (3, 4, 4)


def list_draft_samplers() -> list[str]:
    names = paradec.samplers.names()
    kinds = {name: paradec.samplers.get(name) for name in names if name != "speculative"}
    return [name for name, kind in kinds.items() if kind.family == "draft_verify" and "image" in kind.models]


@pytest.mark.thinned
@pytest.mark.parametrize("name", list_draft_samplers())
def test_every_sampler_makes_pictures(tiny: LlamaGenModel, name: str) -> None:
    sampler = paradec.samplers.create(name)
    out = paint(tiny, sampler=sampler, trace=True)
    assert 0 <= out.codes.min() and out.codes.max() < 32 and (out.steps >= 0).all()
    assert (out.accepted.sum(0) == 16).all()
    if sampler.lossless:
        expected = greedy(tiny.request([1, 2, 3], tiny.grid()), tiny.grid(), 4.0)
        assert torch.equal(paint(tiny, sampler=sampler, temperature=0).tokens, expected)


@pytest.mark.thinned
@pytest.mark.parametrize("condition", ["c2i", "t2i"])
def test_a_smaller_model_drafts(condition: str) -> None:
    model, drafter = tiny_llamagen(condition), tiny_llamagen(condition, seed=5)
    arguments = {"class_labels": [1, 2, 3]}
    if condition == "t2i":
        torch.manual_seed(2)
        arguments = {"prompts": [torch.randn(length, 16) for length in (3, 6)], "class_labels": None}
    drafted = paint(model, sampler=paradec.samplers.create("speculative", drafter=drafter), temperature=0, **arguments)
    assert torch.equal(drafted.tokens, paint(model, sampler=SJD(window=1), temperature=0, **arguments).tokens)
    assert paint(model, sampler=paradec.samplers.create("speculative", drafter=model), **arguments).nfe < 8


def test_packaged_model_draws_the_requested_digits() -> None:
    model, classifier = paradec.load("digits-ar"), load_classifier()
    assert model.vq.config.codebook_size >= 256 and model.vq.config.encoder
    labels = [*range(10)] * 4
    out = paradec.generate_images(model, class_labels=labels, seed=0, output_type="pt")
    assert out.images.shape == (40, 1, 28, 28) and out.tokens_per_forward > 2
    with torch.inference_mode():
        features = classifier.features(out.images)
        right = classifier.output(features).argmax(-1) == torch.tensor(labels)
        decoded = model.decode(model.vq.encode(out.images * 2 - 1).flatten(1), out.grid)
    assert right.float().mean() > 0.93  # in a run of 500 images it was 0.99
    # encoding and decoding keeps the images, which are closer to real digits than noise is
    assert (decoded - out.images).abs().mean() < 0.03
    real = (classifier.held_out_mean, classifier.held_out_covariance)
    noise = classifier.features(torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(0)))
    assert frechet_distance(moments(features), real) < 0.1 * frechet_distance(moments(noise.detach()), real)


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [{"window": 5}, {"tree": (3, 2, 1)}], ids=["chain", "tree"])
def test_packaged_drafter(shape: dict[str, Any]) -> None:
    model, drafter = (paradec.load(name, dtype="float64") for name in ("digits-ar", "digits-ar-drafter"))
    assert sum(p.numel() for p in drafter.module.parameters()) < sum(p.numel() for p in model.module.parameters()) / 4
    sampler = paradec.samplers.create("speculative", drafter=drafter, **shape)
    request = {"class_labels": range(2), "output_type": "latent", "seed": 0}
    one_by_one = paradec.generate_images(model, temperature=0, sampler=SJD(window=1), **request)
    assert one_by_one.row_nfe == [49] * 2 and one_by_one.draft_nfe == [0] * 2
    drafted = paradec.generate_images(model, temperature=0, sampler=sampler, **request)
    assert torch.equal(drafted.codes, one_by_one.codes)
    # most drafts are accepted, and forwards of the drafter are counted separately
    for out in (drafted, paradec.generate_images(model, sampler=sampler, **request)):
        assert out.tokens_per_forward > 2
        depth = sampler.window - 1 if sampler.tree is None else len(sampler.tree)
        steps = np.array(out.row_nfe)
        assert (np.array(out.draft_nfe) <= depth * steps).all() and (np.array(out.draft_nfe) > steps).all()


def test_the_image_command(tmp_path: Path) -> None:
    sheet, trace = tmp_path / "grid.png", tmp_path / "steps.png"
    arguments = ["image", "--class", "0-2,7", "-n", "2", "--seed", "3", "--out", str(sheet), "--trace", str(trace)]
    result = RUNNER.invoke(app, [*arguments, "--set", "window=8", "--columns", "4", "--enlarge", "2", "--json"])
    assert result.exit_code == 0, result.output
    actual = json.loads(result.stdout)
    assert actual["class_labels"] == [0, 1, 2, 7] and len(actual["codes"]) == 8 and actual["sampler"]["window"] == 8
    assert Image.open(sheet).size == (4 * 56 + 3 * 2, 2 * 56 + 2)
    assert Image.open(trace).size == (4 * 154 + 3 * 2, 2 * 154 + 2)
    assert sum(actual["accepted"][0]) == 49 and actual["nfe"] == max(actual["row_nfe"]) < 49
    repeated = RUNNER.invoke(app, ["image", "--class", "0,1,2,7", "-n", "2", "--seed", "3", "--out", str(sheet)])
    assert repeated.exit_code == 0 and "8 pictures of 7 x 7 tokens" in repeated.stdout and "forwards" in repeated.stdout
