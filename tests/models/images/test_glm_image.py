"""GLM-Image's prior: recorded forwards, positions, greedy and drawn tokens; samplers on its preview and image."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from images import last_logits
from recorded import golden, read_arrays, read_json, replays
from scipy.stats import chisquare
from torch import Tensor
from transformers import GlmImageForConditionalGeneration

import paradec
from paradec.core.query import Query
from paradec.models.images import glm_image
from paradec.models.images.base import ImageRequest
from paradec.models.images.glm_image import GlmImageModel, PreviewGrid
from paradec.samplers.causal.zipar import plan_steps

RECORDED = golden("images-autumn") / "glm_image"
CASES = {case["case"]: case for path in sorted(RECORDED.glob("cases.json")) for case in read_json(path)}


@lru_cache
def model() -> GlmImageModel:
    module = GlmImageForConditionalGeneration.from_pretrained(RECORDED / "model", dtype=torch.float64)
    return GlmImageModel(module.eval())


@lru_cache
def case(name: str) -> tuple[dict[str, np.ndarray], PreviewGrid, ImageRequest]:
    arrays, facts = read_arrays(RECORDED / f"{name}.npz"), CASES[name]
    grid = model().make_grid(tuple(facts["large"]), facts["small"] and tuple(facts["small"]))
    rows = [ids[mask > 0].tolist() for ids, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]
    return arrays, grid, model().lay_out(rows, [[tuple(size) for size in facts["sources"]]] * len(rows), grid)


def logits_of(inputs: ImageRequest, row: int, tokens: list[int]) -> Tensor:
    """Return the logits [L, V] of one row, evaluated alone."""
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    query = Query(rows=np.array([row]), tokens=ids, positions=positions, forwarded=np.array([len(tokens)]))
    return inputs.model(query)[0]


@pytest.mark.parametrize("name", CASES)
@replays("name")
def test_positions_and_forwards_equal_the_recorded_ones(name: str) -> None:
    arrays, grid, inputs = case(name)
    facts, codes = CASES[name], arrays["laws"].shape[-1]
    assert grid.length == facts["tokens"]
    assert facts["prompt_lengths"] == [len(prompt) for prompt in inputs.prompts.rows]
    assert facts["batch"] == len(inputs.prompts.rows)
    unrestricted = arrays["greedy_unrestricted"]
    assert facts["non_codes_unrestricted"] == (unrestricted >= codes).sum()
    assert facts["distinct_greedy"] == len(np.unique(arrays["greedy"]))
    for row, prompt in enumerate(inputs.prompts.rows):
        first = len(arrays["input_ids"][row]) - len(prompt)
        expected = np.concatenate((arrays["prompt_positions"][:, row, first:], arrays["decode_positions"][:, row]), 1)
        # the last recorded position is the end token's, which paradec does not evaluate
        assert np.array_equal(inputs.model._token_positions[row, : len(prompt) + grid.length].T, expected[:, :-1])
        logits = logits_of(inputs, row, [*prompt, *arrays["forced"][row].tolist()])[len(prompt) - 1 :]
        np.testing.assert_allclose(logits.numpy(), arrays["forced_logits"][row], atol=1e-9, rtol=0)
        if len(unrestricted[row]) == grid.length:  # the run without restrictions did not stop early
            actual = logits_of(inputs, row, [*prompt, *unrestricted[row].tolist()])[len(prompt) - 1 : -1].argmax(-1)
            assert np.array_equal(actual, unrestricted[row])


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ("sjd(window=1)", "sjd", "scd", "gsd", "jacobi", "zipar(window=99)"))
@pytest.mark.parametrize("name", CASES)
@replays("name")
def test_greedy_tokens_equal_the_recorded_ones(name: str, sampler: str) -> None:
    arrays, grid, inputs = case(name)
    method = paradec.samplers.create(sampler)
    state = model().begin(method, inputs, grid, paradec.Request(sampler=method, temperature=0))
    paradec.decode(method, inputs.model, state)
    reading = model().read(state, grid)
    assert np.array_equal(reading.tokens.numpy(), arrays["greedy"])
    assert np.array_equal(grid.prior_token_ids(reading.tokens).numpy(), arrays["prior_greedy"])
    assert (state.nfe <= grid.length).all()


@pytest.mark.parametrize("name", CASES)
@replays("name")
def test_distributions_and_draws_equal_the_recorded_ones(name: str) -> None:
    arrays, grid, inputs = case(name)
    method = paradec.samplers.create("sjd")
    request = paradec.Request(sampler=method, **model().defaults)
    state = model().begin(method, inputs, grid, request)
    for row, prompt in enumerate(inputs.prompts.rows):
        logits = logits_of(inputs, row, [*prompt, *arrays["sampled"][row].tolist()])[None, len(prompt) - 1 : -1]
        positions = torch.arange(len(prompt), len(prompt) + grid.length)[None]
        actual = state.distribution(logits, np.array([row]), positions)[0].numpy()
        codes = arrays["laws"].shape[-1]
        np.testing.assert_allclose(actual[:, :codes], arrays["laws"][row], atol=1e-6)
        assert (actual[:, codes:] == 0).all()  # only codes can be drawn
        assert np.array_equal((actual.cumsum(1) > arrays["uniforms"][row][:, None]).argmax(1), arrays["sampled"][row])
    assert np.array_equal(grid.prior_token_ids(torch.from_numpy(arrays["sampled"])).numpy(), arrays["prior_sampled"])


@pytest.fixture
def small_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glm_image, "PREVIEW", 4)


def test_the_module_s_cached_positions_do_not_change_images(small_previews: None) -> None:
    glm, sizes = model(), [(128, 96), (64, 32)]
    prompts = [[100, 101, 102, 64], [103, 64]]
    alone = [paradec.generate_images(glm, prompts, height=h, width=w, seed=3, output_type="latent") for h, w in sizes]
    glm.module.model._cached_decode_position_ids, glm.module.model._prefill_len = torch.zeros(2, 3, 9).long(), 5
    for (height, width), before in list(zip(sizes, alone, strict=True))[::-1]:
        out = paradec.generate_images(glm, prompts, height=height, width=width, seed=3, output_type="latent")
        assert torch.equal(out.tokens, before.tokens) and out.codes.shape == (2, height // 32, width // 32)
        assert out.prior_token_ids.shape == (2, height * width // 256) and int(out.tokens.max()) < 64
        assert (out.steps >= 0).all() and out.steps.shape == out.codes.shape


def test_batches_of_several_sizes_equal_single_sizes(small_previews: None) -> None:
    sizes = [(64, 32), (128, 96), (64, 32), (32, 64), (128, 96), (64, 64)]
    request: dict[str, Any] = {"temperature": 0, "sampler": "scd", "output_type": "latent"}
    prompt = [100, 101, 102, 64]
    prompts = [{"prompt": prompt, "height": height, "width": width} for height, width in sizes]
    many = list(paradec.generate_many(model(), prompts, batch_size=3, height=64, width=64, **request))
    for (height, width), actual in zip(sizes, many, strict=True):
        alone = paradec.generate_images(model(), prompt, height=height, width=width, **request)
        assert actual.error is None and actual.tokens.tolist() == alone.tokens.tolist()
        assert actual.codes.shape == alone.codes.shape and actual.grid == alone.grid
    wrong = list(paradec.generate_many(model(), [{"prompt": prompt, "height": 33}], height=64, width=64, **request))
    assert "height=33" in str(wrong[0].error)


def test_refilled_batches_equal_single_rows(small_previews: None) -> None:
    prompts, request = [[100, 101, 102, 64], [103, 64]], {"height": 64, "width": 32, "output_type": "latent"}
    request |= {"temperature": 0, "sampler": "scd"}
    alone = [paradec.generate_images(model(), prompt, **request).tokens[0] for prompt in prompts]
    many = list(paradec.generate_many(model(), prompts * 2, batch_size=2, **request))
    assert len(many) == 4
    for actual in many:
        assert torch.equal(actual.tokens[0], alone[actual.index % 2])


def test_preview_sizes_equal_the_processor_s() -> None:
    for height, width, small in ((1024, 1024, (16, 16)), (1152, 768, (19, 13)), (32, 96, (9, 27)), (320, 32, (50, 5))):
        assert model().grid(height, width).preview == small
    assert model().grid().height == 36 and model().grid().width == 24


def test_models_and_pipelines_load(tmp_path: Any) -> None:
    assert isinstance(paradec.load(RECORDED / "model"), GlmImageModel)
    (tmp_path / "vision_language_encoder").symlink_to(RECORDED / "model", target_is_directory=True)
    (tmp_path / "model_index.json").write_text('{"_class_name": "GlmImagePipeline"}')
    actual = paradec.load(tmp_path, dtype="float64")
    assert actual.dtype == torch.float64 and actual.defaults["top_p"] == 0.75 and actual.image_ids == range(64)
    assert actual.codebook().shape == (72, 16) and actual.codebook()[64:].isnan().all()


GRID = PreviewGrid(3, 4, range(64), preview=(2, 2))


@pytest.mark.parametrize("window", [1, 2, 3])
def test_zipar_decodes_the_preview_before_the_large_raster(window: int) -> None:
    steps = plan_steps(GRID, window)
    assert sorted(target for step in steps for target in step.targets) == list(range(GRID.length))
    preview_steps = [number for number, step in enumerate(steps) if min(step.targets) < 4]
    assert max(preview_steps) < min(number for number, step in enumerate(steps) if max(step.targets) >= 4)
    assert len(steps) == (2 + min(window, 2)) + (4 + 2 * min(window, 4))
    assert set(range(-1, 3)) <= {position for step in steps[:-1] for position in step.positions}
    method = paradec.samplers.create("zipar", window=window)
    inputs = model().lay_out([[100, 101, 64], [102, 64]], [(), ()], GRID)
    state = model().begin(method, inputs, GRID, paradec.Request(sampler=method, temperature=0))
    paradec.decode(method, inputs.model, state)
    tokens = model().read(state, GRID).tokens
    # at these offsets ZipAR's tokens have the same context as in token-by-token decoding
    for row, prompt in enumerate(inputs.prompts.rows):
        for offset in (0, 1, 4, 5):
            logits = last_logits(inputs.model, row, prompt + tokens[row, :offset].tolist())
            assert int(logits[:64].argmax()) == int(tokens[row, offset])
    assert int(state.nfe[0]) == len(steps)


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["sjd(window=2)", "scd(window=2)", "jacobi(window=2)"])
def test_pairs_of_tokens_have_the_model_s_distribution(sampler: str) -> None:
    rows, prompt, grid = 1500, [100, 101, 64], PreviewGrid(1, 1, range(64), preview=(1, 1))
    method = paradec.samplers.create(sampler)
    request = paradec.Request(sampler=method, seed=1, **model().defaults)
    inputs = model().lay_out([prompt] * rows, [()] * rows, grid)
    state = model().begin(method, inputs, grid, request)
    probability = {}
    for first in range(64):
        logits = logits_of(inputs, 0, [*prompt, first])[None, len(prompt) - 1 :]
        p = state.distribution(logits, np.array([0]), torch.arange(3, 5)[None])[0].numpy()
        probability |= {(first, second): p[0, first] * p[1, second] for second in range(64)}
    paradec.decode(method, inputs.model, state)
    actual = [tuple(pair) for pair in model().read(state, grid).tokens.tolist()]
    assert all(probability[pair] > 0 for pair in actual)
    likely = [pair for pair, p in probability.items() if p * rows >= 5]
    counts = np.array([actual.count(pair) for pair in likely])
    expected = rows * np.array([probability[pair] for pair in likely])
    assert len(likely) > 5 and expected.sum() > 0.98 * rows
    assert chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-3
