"""GLM-Image's prior decoded by a paradec sampler inside its pipeline."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from decoding import refuses
from packaging.version import Version
from PIL import Image
from pipelines import attributes, dit_pipeline, glm_image_pipeline
from recorded import golden, read_arrays, read_json, replays
from torch import Tensor

import paradec
from paradec import TaylorSeer, accelerate
from paradec.models.images import glm_image

RECORDED = golden("images-autumn") / "glm_image"
CASES = {case["case"]: case for path in sorted(RECORDED.glob("cases.json")) for case in read_json(path)}


@pytest.fixture(scope="module")
def pipe() -> Any:
    result = glm_image_pipeline(RECORDED)
    config = result.vision_language_encoder.config
    num_codes, vocab_size = config.vq_config.num_embeddings, config.text_config.vision_vocab_size
    generation_config = result.vision_language_encoder.generation_config
    generation_config.top_k, generation_config.suppress_tokens = 1, list(range(num_codes, vocab_size))
    return result


def run(pipe: Any, prompt: Any = ("a fox", "cat"), seed: int = 0, **options: Any) -> Tensor:
    call = {"height": 64, "width": 96, "num_inference_steps": 5, "output_type": "latent"} | options
    prompt = [*prompt] if isinstance(prompt, tuple) else prompt
    return pipe(prompt, generator=torch.Generator().manual_seed(seed), **call).images


@pytest.mark.thinned
@pytest.mark.parametrize("name", CASES)
@replays("name")
def test_prior_replays_the_pipeline(name: str, pipe: Any) -> None:
    arrays, facts = read_arrays(RECORDED / f"{name}.npz"), CASES[name]
    arguments = ("input_ids", "attention_mask", "image_grid_thw", "images_per_sample")
    inputs = {key: torch.from_numpy(arrays[key]) for key in arguments}
    with accelerate(pipe, prior={"sampler": "scd", "temperature": 0}):
        encoder, max_new_tokens = pipe.vision_language_encoder, facts["tokens"] + 1
        generated_ids = encoder.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=True)
    prompt_length = inputs["input_ids"].shape[1]
    assert torch.equal(generated_ids[:, :prompt_length], inputs["input_ids"])
    assert np.array_equal(generated_ids[:, prompt_length:].numpy(), arrays["greedy"])
    count, has_no_image = int(inputs["images_per_sample"][0]), not facts["sources"]
    _, start, height, width = pipe._compute_generation_params(inputs["image_grid_thw"][:count], has_no_image)
    sizes = (prompt_length, start, height * width)
    parts = [pipe._extract_large_image_tokens(row[None], *sizes) for row in generated_ids]
    prior = torch.cat([pipe._upsample_token_ids(part, height, width) for part in parts])
    assert np.array_equal(prior.numpy(), arrays["prior_greedy"])
    # diffusers 0.41 gives other images than the recorded ones
    if has_no_image and Version(diffusers.__version__) >= Version("0.42"):
        recorded = read_arrays(RECORDED / "pipeline.npz")
        noise, prompt, negative = (torch.from_numpy(recorded[f"{name}/{k}"]) for k in ("noise", "prompt", "negative"))
        for kind, tokens in (("greedy", prior), ("sampled", torch.from_numpy(arrays["prior_sampled"]))):
            latents = pipe(
                prompt_embeds=prompt, negative_prompt_embeds=negative, latents=noise, prior_token_ids=tokens,
                height=height * 32, width=width * 32, num_inference_steps=6, guidance_scale=1.5, output_type="latent",
            ).images  # fmt: skip
            np.testing.assert_allclose(latents.numpy(), recorded[f"{name}/latents_{kind}"], atol=1e-4, rtol=0)


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["scd", "sjd", "zipar(window=99)"])
def test_latents_equal_those_of_the_pipeline_prior(sampler: str, pipe: Any) -> None:
    encoder = pipe.vision_language_encoder
    expected = run(pipe)
    expected_of_one = run(pipe, "a cat", height=32, width=64)
    before = attributes(encoder)  # after a run, because the encoder's own `generate` stores positions in the encoder
    with accelerate(pipe, TaylorSeer(interval=2)):
        forecast = run(pipe)
    session = accelerate(pipe, prior=sampler)
    assert torch.equal(run(pipe, "a cat", height=32, width=64), expected_of_one) and torch.equal(run(pipe), expected)
    assert session.runs == 2 and session.latest.prior_token_ids.shape == (2, 2 * 3 * 4)
    assert session.report().short.startswith("run 2: prior of 2 x 18 tokens in ") and "x 18" in repr(session)
    session.detach()
    session.detach()
    assert "generate" not in vars(encoder) and attributes(encoder).keys() == before.keys()
    assert torch.equal(run(pipe), expected) and session.runs == 2
    with accelerate(pipe, TaylorSeer(interval=2), prior=sampler) as session:
        assert torch.equal(run(pipe), forecast) and not torch.equal(forecast, expected)
        assert session.report().forecast.full_steps == [0, 2, 4] and "4 forecast" in session.report().short


def test_pictures_are_edited(pipe: Any) -> None:
    draw, encoder = np.random.default_rng(0), pipe.vision_language_encoder
    pictures = [Image.fromarray(draw.integers(0, 255, (32, 64, 3), np.uint8)) for _ in range(2)]
    actual = []
    for order in (pictures, pictures[::-1]):
        texts = [f"<start><|image|><end>{words}" for words in ("a fox", "cat")]
        size = {"target_h": 64, "target_w": 96, "padding": True, "return_tensors": "pt"}
        inputs = pipe.processor(images=[[picture] for picture in order], text=texts, **size)
        inputs["pixel_values"] = inputs["pixel_values"].double()
        expected = encoder.generate(**inputs, max_new_tokens=7, do_sample=False, top_k=None, top_p=None)
        with accelerate(pipe, prior="scd") as session:
            tokens = encoder.generate(**inputs, max_new_tokens=7, do_sample=True)
        assert session.latest.grid.preview == (0, 0) and session.latest.tokens.shape == (2, 6)
        assert torch.equal(tokens, expected[:, :-1])
        actual.append(session.latest.tokens)
    assert not torch.equal(*actual)


def test_draws_follow_the_pipeline_s_generator(pipe: Any) -> None:
    settings = {"sampler": "sjd", "top_k": 0, "temperature": 1.0, "top_p": 1.0}
    for prior in (settings, {"seed": 5, **settings}):
        token_ids = []
        with accelerate(pipe, prior=prior) as session:
            for seed in (1, 2, 1):
                run(pipe, "cat", seed)
                token_ids.append(session.latest.tokens)
        assert torch.equal(token_ids[0], token_ids[2]) and torch.equal(token_ids[0], token_ids[1]) == ("seed" in prior)
        assert max(int(row.max()) for row in token_ids) < 64


@pytest.mark.thinned
@pytest.mark.parametrize("place", ["processor", "vision_language_encoder", None])
def test_generate_images_takes_text(place: str | None, pipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(glm_image, "PREVIEW", 4)
    glm = glm_image.GlmImageModel(pipe.vision_language_encoder, pipe.processor)
    if place is not None:
        shutil.copytree(RECORDED / "model", tmp_path / "vision_language_encoder")
        (tmp_path / "model_index.json").write_text("{}")
        pipe.processor.save_pretrained(tmp_path / place)
        glm = paradec.load(tmp_path, dtype="float64")
        monkeypatch.setattr(glm.tokenizer, "_get_target_shape", pipe.processor._get_target_shape)
    out = paradec.generate_images(glm, "a fox", height=64, width=96, temperature=0, output_type="latent")
    with accelerate(pipe, prior={"temperature": 0}) as session:
        run(pipe, "a fox")
    assert torch.equal(session.latest.tokens, out.tokens)


def test_prior_is_refused(pipe: Any) -> None:
    encoder = pipe.vision_language_encoder
    before = attributes(encoder)
    refuses(lambda: accelerate(dit_pipeline(), prior="scd"), "prior='scd' is for GLM-Image: DiTPipeline", TypeError)
    for prior, message in (
        ("scdd", "did you mean 'scd'"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature=-1"),
        ("low_confidence", "low_confidence"),
    ):
        refuses(partial(accelerate, pipe, prior=prior), message, (ValueError, TypeError))
    refuses(lambda: accelerate(pipe, prior="scd", cache="block"), "cache='block' and prior='scd'")
    refuses(lambda: accelerate(pipe, "taylorsee", prior="scd"), "did you mean 'taylorseer'")
    assert attributes(encoder) == before
    with accelerate(pipe, prior="scd"):
        refuses(lambda: accelerate(pipe, prior="sjd"), "has a session already")
        with pytest.raises(ValueError, match="streamer: .* detach the session"):
            encoder.generate(input_ids=torch.tensor([[100, 64]]), image_grid_thw=torch.ones(2, 3).long(), streamer=1)
        refuses(lambda: encoder.generate(input_ids=torch.tensor([[100, 64]])), "image_grid_thw=None")
    with accelerate(pipe, prior={"guidance_scale": 2.0}), pytest.raises(ValueError, match="guide the DiT"):
        run(pipe)
    encoder.generation_config.num_beams = 3
    refuses(lambda: accelerate(pipe, prior="scd"), "num_beams=3 of vision_language_encoder's generation config")
    encoder.generation_config.num_beams = 1
