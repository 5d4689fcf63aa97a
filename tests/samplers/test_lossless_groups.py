"""Lossless groups of an LPD: the images have the same tokens, or distribution, as with one position per call."""

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafters import exactness
from images import tiny_lpd
from oracles.pictures import groups_of_one, one_cell_per_call
from places import load_script

import paradec
from paradec.core import orders
from paradec.core.protocol import Sampler, decode
from paradec.models.images.lpd import LPD, LPDConfig, LPDModel
from paradec.request import Request
from paradec.samplers.pictures.groups import Groups
from paradec.samplers.start import row_keys


def random_lpd(seed: int, **sizes: Any) -> LPDModel:
    """A random network with a strong influence of attention and the class. sizes: fields of `LPDConfig`."""
    torch.manual_seed(seed)
    module = LPD(LPDConfig(**sizes)).double()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and "emb" not in name:
            torch.nn.init.normal_(parameter, std=(4 if "attn" in name else 2) * parameter.shape[1] ** -0.5)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.7 if "pos" in name else 2.0)
    return LPDModel(module.requires_grad_(False), defaults={"guidance_scale": 1.0})


MODELS: dict[str, Callable[[], LPDModel]] = {
    "tiny": lambda: random_lpd(2, dim=16, n_layer=2, n_head=2, grid=4, vocab_size=32, num_classes=5),
    "square": lambda: random_lpd(3, dim=8, n_layer=2, n_head=2, grid=3, vocab_size=6, num_classes=2),
    "deep": lambda: random_lpd(5, dim=12, n_layer=3, n_head=3, grid=4, vocab_size=20, num_classes=4, inner=10),
}
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.0, "guidance_scale": 3.0},
    {"temperature": 0.7, "guidance_scale": 2.5, "top_k": 4},
    {"temperature": 1.3, "guidance_scale": 1.5, "top_p": 0.8, "top_k": 5},
]


@pytest.mark.thinned
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_one_position_per_call(name: str, setting: int) -> None:
    model, request = MODELS[name](), SETTINGS[setting]
    labels = [0, 1, 1]
    schedule = ("linear", "constant")[setting % 2]
    for order in ("random", "lpd" if setting == 0 else "raster"):
        sampler = Groups(order=order, lossless=True, guidance_schedule=schedule, window=(None, 3)[setting // 2])
        out = paradec.generate_images(
            model, class_labels=labels, sampler=sampler, seed=setting, output_type="latent", **request
        )
        size, blank = model.module.config.grid**2, model.blank_id
        rows = [[blank + 1 + label] for label in labels]
        grid = model.module.config.grid
        groups = orders.create(order).groups(grid, grid, draws_of_rows([setting] * 3, rows))
        keys = torch.as_tensor(row_keys([setting] * 3, [[*row, *[blank] * size] for row in rows]))
        for row, label in enumerate(labels):
            positions = torch.as_tensor(groups.order[row].copy())
            arguments = (positions, keys[row], Request(**request), schedule == "linear")
            expected = one_cell_per_call(model, label, *arguments)
            assert out.tokens[row].tolist() == expected.tolist(), (order, row)
            assert out.row_nfe[row] <= size
        assert out.row_forwards == sum(out.row_nfe) * (2 if "guidance_scale" in request else 1)
    if setting == 0:
        assert max(out.row_nfe) < size or name == "deep"


def draws_of_rows(seeds: list[int], rows: list[list[int]]) -> Any:
    return orders.draws_from_keys(torch.as_tensor(row_keys(seeds, rows)))


@pytest.mark.thinned
@pytest.mark.parametrize("verify", ["jacobi", "sjd", pytest.param("scd", marks=pytest.mark.full)])
def test_the_distribution_equals_that_of_groups_of_one(verify: str) -> None:
    model = random_lpd(1, dim=8, n_layer=2, n_head=2, grid=2, vocab_size=3, num_classes=2)
    order, count = torch.tensor([2, 0, 3, 1]), 2_000
    expected = torch.zeros(81, dtype=torch.float64)
    for index, tokens in enumerate(itertools.product(range(3), repeat=4)):
        image = torch.tensor(tokens)
        logp = groups_of_one(model, 1, image, order, 2.0, True).log_softmax(-1)
        expected[index] = logp.gather(1, image[order].unsqueeze(1)).sum().exp()
    fixed_order = orders.create("given", cells=order.tolist())
    counts = []
    for sampler in (Groups(order=fixed_order, lossless=True, verify=verify), Groups(order=fixed_order)):
        out = paradec.generate_images(
            model, class_labels=1, num_images=count, sampler=sampler, seed=3, guidance_scale=2.0, output_type="latent"
        )
        counts.append(torch.bincount((out.tokens * torch.tensor([27, 9, 3, 1])).sum(1), minlength=81))
        assert exactness.p_value(counts[-1].numpy(), expected.numpy()) > 1e-3
    assert expected.sum() == pytest.approx(1) and exactness.p_value(counts[0].numpy(), expected.flip(0).numpy()) < 1e-6


def test_images_do_not_depend_on_the_batch_and_states_can_be_copied() -> None:
    model = MODELS["deep"]()
    sampler = Groups(lossless=True)
    fields = {"guidance_scale": 2.0, "seed": [3, 4, 5], "sampler": sampler, "output_type": "latent"}
    together = paradec.generate_images(model, class_labels=[0, 1, 2], **fields)
    for row in range(3):
        alone = paradec.generate_images(model, class_labels=row, **(fields | {"seed": 3 + row}))
        assert torch.equal(alone.tokens[0], together.tokens[row]) and alone.row_nfe[0] == together.row_nfe[row]
    prepared = model.request([0, 1, 2], model.grid())
    request = Request(sampler=sampler, guidance_scale=2.0, seed=[3, 4, 5], temperature=1.0)
    state = sampler.start(model, prepared.prompts, request, grid=model.grid(), negative_prompt=prepared.unconditional)
    decode(sampler, model, state, lambda *_: True)
    first, second = sampler.step(model, state), sampler.step(model, state)
    assert torch.equal(first.values, second.values) and torch.equal(first.quantities["p"], second.quantities["p"])
    for copied_state in (state, pickle.loads(pickle.dumps(state))):
        decode(sampler, model, copied_state)
        assert torch.equal(copied_state.canvas[:, 1:], together.tokens)


def test_traces_list_each_position_once_and_counts_sum_to_all_positions() -> None:
    model = tiny_lpd()
    request = {"class_labels": [1, 2], "seed": 1, "trace": True, "guidance_scale": 1.0}
    out = paradec.generate_images(model, sampler=Groups(lossless=True, order="random"), **request)
    assert out.recorded_trace is not None and len(out.images) == 2
    assert sum(counts.sum() for counts in out.accepted) == 32
    positions = [position for step in out.trace.steps for row, position, *_ in step.commits if row == 0]
    assert sorted(positions) == [*range(1, 17)]
    assert out.trace.steps[0].forwarded == [17, 17] and len(out.trace.steps) == max(out.row_nfe)


def test_lossless_and_lossy_groups_use_the_same_order() -> None:
    model = MODELS["deep"]()
    prepared = model.request([1], model.grid())
    for order, steps in (("lpd", 6), ("lpd", None), ("halton", None)):
        request = Request(sampler=Groups(order=order), seed=7, steps=steps, temperature=1.0)
        lossy = Groups(order=order).start(model, prepared.prompts, request, grid=model.grid())
        exact = Groups(order=order, lossless=True).start(model, prepared.prompts, request, grid=model.grid())
        assert exact.order[0, 1:17].tolist() == lossy.cells[0].tolist()


def test_nan_logits_are_refused_and_settings_survive_a_round_trip() -> None:
    broken = random_lpd(3, dim=8, n_layer=1, n_head=1, grid=3, vocab_size=6, num_classes=2)
    broken.module.mask_token.data[0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN or infinite logits for row 0"):
        paradec.generate_images(broken, class_labels=0, sampler=Groups(lossless=True), output_type="latent")
    assert Sampler.from_dict(Groups(lossless=True, window=2).to_dict()) == Groups(lossless=True, window=2)
    assert replace(Groups(lossless=True), verify="sjd").verifier.name == "sjd"


def test_the_packaged_model_draws_the_requested_digits_in_few_calls() -> None:
    model, classifier = paradec.load("digits-lpd"), load_script("benchmarks/digit_quality.py").load_classifier()
    labels = [*range(10)] * 2
    for sampler in (Groups(), Groups(lossless=True)):
        out = paradec.generate_images(model, class_labels=labels, seed=0, sampler=sampler, output_type="pt")
        with torch.inference_mode():
            right = classifier(out.images).argmax(-1) == torch.tensor(labels)
        assert right.float().mean() >= 0.85  # of 500 images 98 % are right
        assert out.nfe < 16
    model = paradec.load("digits-lpd", dtype="float64")
    request: dict[str, Any] = {"class_labels": [3, 8], "seed": 1, "output_type": "latent"}
    methods = (Groups(lossless=True, window=window) for window in (1, None))
    one_by_one, in_groups = (paradec.generate_images(model, sampler=method, **request) for method in methods)
    assert torch.equal(one_by_one.tokens, in_groups.tokens)
    assert one_by_one.nfe == 49 and in_groups.nfe < 16
