"""LPD: recorded runs of its public code, cached and teacher-forced decoding, files, and the entry points."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from images import tiny_lpd
from recorded import assert_checksum, image_case, image_cases, image_file, replays
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core import orders
from paradec.kernels.token_stats import draw
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.loading import file_type
from paradec.models.images.lpd import GUIDANCE, LPD, PRESETS, LPDConfig, LPDModel, load_lpd, resize_positions
from paradec.samplers.distributions import apply_guidance
from paradec.samplers.pictures.groups import Groups


def load_recorded(name: str, dtype: torch.dtype) -> LPDModel:
    sizes, _ = image_case("lpd", f"{name}.config")
    return load_lpd(image_file("lpd", f"{name}.safetensors"), n_head=sizes["num_heads"], dtype=dtype)


@dataclass(frozen=True)
class ReplayingGroups(Groups):
    steps: Any = None
    generator: Any = None

    def draw(self, state: Any, distribution: Tensor, positions: Tensor) -> Tensor:
        if self.generator is None:
            return draw(distribution, torch.tensor(self.steps[state.index]["u"]).double())
        return torch.multinomial(distribution.flatten(0, 1), 1, generator=self.generator).view(positions.shape)


@pytest.mark.parametrize("name", image_cases("lpd", "steps"))
@replays("name", "lpd/")
def test_decoding_equals_the_recorded_run(name: str) -> None:
    case, arrays = image_case("lpd", name)
    settings, steps = case["settings"], case["steps"]
    seed = re.search(r"manual_seed\((\d+)\)", case["draws"])
    # margins below 1e-4 need float64; seeded runs need float32, because torch draws other numbers in float64
    dtype = torch.float32 if case["margin"] >= 1e-4 or seed is not None else torch.float64
    model = load_recorded(case["model"], dtype)
    order = orders.Given(cells=case["orders"], sizes=settings["group_sizes"])
    generator = None if seed is None else torch.Generator().manual_seed(int(seed[1]))
    sampler = ReplayingGroups(order, settings["cfg_schedule"], steps=steps, generator=generator)
    none = model.module.config.num_classes
    labels = [none] * settings["batch"] if settings["labels"] is None else settings["labels"]
    first = model.blank_id + 1
    assert settings["batch"] == len(labels)
    guidance = {"guidance_scale": settings["cfg"]}
    if settings["cfg"] != 1:
        guidance["negative_prompt"] = [[first + none]] * len(labels)
    sampling = {"temperature": settings["temperature"], "top_k": settings["top_k"] or None, "top_p": settings["top_p"]}
    state = sampler.start(model, [[first + label] for label in labels], **sampling, **guidance)
    for index, step in enumerate(steps):
        (query,) = sampler.query(state)
        begin, end = step["order_rows"]
        assert (int(query.slots.min()), int(query.slots.max()) + 1) == (begin, end)
        assert_checksum(model._embed(query.tokens, query), step["input"])
        logits = model(query, state.store)
        proposal = sampler.propose(state, [logits], [query])
        for layer, sums in enumerate(step["kv"]):
            for stored, expected in zip((state.store.layer_keys, state.store.layer_values), sums, strict=True):
                assert_checksum(stored[layer][:, :end].transpose(1, 2), expected)
        if state.branches == 2:
            logits = apply_guidance(logits, sampler.guidance(state))
        assert_checksum(logits, step["guided_logits"])
        if f"guided_logits.{index}" in arrays:
            expected = arrays[f"guided_logits.{index}"]
            assert (logits.reshape(expected.shape) - expected).abs().max() < 1e-4
        assert (proposal.positions - 1).tolist() in ([step["positions"]] * len(labels), step["positions"])
        assert proposal.values.tolist() == step["tokens"]
        sampler.commit(state, proposal)
    assert state.done and state.nfe.tolist() == [case["calls"]] * len(labels)
    assert state.canvas[:, 1:].tolist() == case["codes"]


@pytest.mark.parametrize("name", image_cases("lpd", "logits_in_order"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@replays("name", "lpd/")
def test_one_forward_equals_the_recorded_one(name: str, dtype: torch.dtype) -> None:
    case, arrays = image_case("lpd", name)
    model = load_recorded(case["model"], dtype)
    inputs = (torch.tensor(case[key]) for key in ("codes", "labels", "orders"))
    with torch.no_grad():
        actual = model.module(*inputs, case["group_sizes"])
    assert (actual - arrays["logits_in_order"]).abs().max() < 1e-4


ORDERS: list[Any] = [
    "lpd", "raster", "diagonal", "cosine", {"order": "random", "sizes": 5}, {"order": "halton", "sizes": 3},
    {"order": "zipar", "window": 2}, {"order": "lpd", "sizes": 1}, {"order": "raster", "sizes": [7, 1, 8]},
]  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_cached_decoding_equals_one_forward(order: Any) -> None:
    model, sampler = tiny_lpd(), samplers.create("groups", order=order)
    state = sampler.start(model, [[model.blank_id + 1 + label] for label in (3, 0, 4)], seed=[1, 2, 3])
    cached_logits = []
    while not state.done:
        queries = sampler.query(state)
        logits = model(queries[0], state.store)
        cached_logits.append(logits)
        sampler.commit(state, sampler.propose(state, [logits], queries))
    codes, ranks = state.canvas[:, 1:], torch.as_tensor(state.groups.order.copy())
    with torch.no_grad():
        full = model.module(codes, torch.tensor([3, 0, 4]), ranks, state.groups.sizes)
    assert torch.allclose(torch.cat(cached_logits, 1), full, atol=1e-10, rtol=0)
    assert len(cached_logits) == len(state.groups) == state.nfe[0]


def test_files_and_folders_load_alike(tmp_path: Path) -> None:
    model = tiny_lpd()
    weights = {name: tensor.float() for name, tensor in model.module.state_dict().items()}
    torch.save({"model": weights, "epoch": 3}, tmp_path / "tiny.pth")
    save_file(weights, tmp_path / "model.safetensors")
    defaults = {"guidance_scale": 2.0, "top_k": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lpd", "n_head": 2, "defaults": defaults}))
    assert file_type(tmp_path / "tiny.pth") == file_type(tmp_path / "model.safetensors") == "lpd"
    single = paradec.load(tmp_path / "tiny.pth", n_head=2, dtype="float64")
    folder = paradec.load(tmp_path, dtype="float64")
    assert single.module.config == folder.module.config == replace(model.module.config, inner=64)
    assert (single.facts.name, folder.defaults["top_k"], single.defaults["top_k"]) == ("tiny", 9, None)
    request = {"class_labels": [1], "seed": 0, "output_type": "latent"}
    outputs = [paradec.generate_images(m, **request) for m in (single, folder)]
    assert not torch.equal(outputs[0].codes, outputs[1].codes)  # the folder has other defaults
    assert torch.equal(outputs[1].codes, paradec.generate_images(single, **request, **defaults).codes)
    assert {parameter.dtype for parameter in paradec.load(tmp_path).module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.bias": None}, "missing weights: norm.bias$"),
        ({"blocks.1.attn.qkv.weight": None}, "missing weights: blocks.1.attn.qkv.weight$"),
        ({"blocks.0.ln.weight": torch.zeros(3)}, "unexpected weights: blocks.0.ln.weight$"),
        ({"head.weight": torch.zeros(5, 16)}, r"mismatched weights: head.weight \[5, 16\] instead of \[32, 16\]"),
        ({"class_emb.weight": None}, "'class_emb.weight' is missing"),
        ({"pos_embed": torch.zeros(1, 18, 16)}, r"mismatched weights: pos_embed \[1, 18, 16\]"),
    ],
)
def test_incomplete_checkpoints_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    weights = {name: tensor.float() for name, tensor in tiny_lpd().module.state_dict().items()}
    weights = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    save_file(weights, tmp_path / "half.safetensors")
    refuses(lambda: load_lpd(tmp_path / "half.safetensors", n_head=2), message, CheckpointError)


def test_resizing_changes_positions_but_not_the_class_entry(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = torch.randn(1, 17, 3)
    assert torch.equal(resize_positions(table, 4)[:, :1], table[:, :1])
    assert (resize_positions(table, 4) - table).abs().max() < 1e-6
    larger = resize_positions(table, 8)
    assert larger.shape == (1, 65, 3) and torch.equal(larger[:, 0], table[:, 0])
    # interpolation keeps linear functions, except at the border
    plane = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 4).reshape(1, 16, 1)
    grown = resize_positions(torch.cat((torch.zeros(1, 1, 1), plane), 1), 8)[0, 1:].view(8, 8)
    assert (grown[:, 0] == grown[:, 5]).all() and grown[4, 0] - grown[3, 0] == pytest.approx(0.5, abs=0.1)
    save_file(tiny_lpd().module.state_dict(), tmp_path / "tiny.safetensors")
    model = load_lpd(tmp_path / "tiny.safetensors", n_head=2, grid=6)
    assert paradec.generate_images(model, class_labels=[1, 2], seed=0, output_type="latent").codes.shape == (2, 6, 6)


def paint(model: LPDModel, **request: Any) -> Any:
    arguments = {"class_labels": [1, 2], "seed": 0, "guidance_scale": 2.0, "output_type": "latent"}
    return paradec.generate_images(model, **(arguments | request))


def test_pictures_are_decoded_from_codes() -> None:
    model = tiny_lpd()
    output = paint(model, output_type="pt")
    assert output.images.shape == (2, 3, 8, 8) and output.codes.shape == (2, 4, 4)
    assert torch.equal(output.images, model.decode(output.tokens, output.grid))
    assert output.accepted.sum(0).tolist() == [16, 16] and output.row_nfe == [5, 5]
    # groups of 1, 2, 4, 4 and 5: each of two branches evaluates the class, 16 masks, and the first 11 tokens
    assert output.forwarded_tokens == 2 * 2 * (1 + 16 + 11)
    refuses(lambda: paint(LPDModel(model.module), output_type="pt"), "has no VQ decoder")


def test_top_p_applies_after_top_k() -> None:
    """As in the public code, probabilities are renormalised after top-k, before top-p."""
    model = tiny_lpd()
    sampler = samplers.create("groups")
    state = sampler.start(model, [[33]], top_k=2, top_p=0.55)
    logits = torch.tensor([0.3, 0.2, 0.18, 0.17, 0.15]).log().view(1, 1, 5)
    # top-p alone would keep three tokens; after top-k=2 the first token has probability 0.6
    assert sampler.distribution(state, logits).flatten().tolist() == [1, 0, 0, 0, 0]


def test_guidance_grows_with_the_rank() -> None:
    model = tiny_lpd()
    image_request = model.request([1], model.grid())
    sampler = samplers.create("groups", order={"order": "raster", "sizes": [1, 3, 12]})
    request = {"seed": 0, "guidance_scale": 5.0, "negative_prompt": image_request.unconditional}
    state = sampler.start(model, image_request.prompts, **request)
    actual = []
    while not state.done:
        actual += sampler.guidance(state).flatten().tolist()
        sampler.commit(state, sampler.step(model, state))
    assert actual == [1 + 4 * rank / 16 for rank in range(16)]
    assert replace(sampler, guidance_schedule="constant").guidance(state) == 5.0
    # with a guidance scale of 1 only one branch is evaluated
    assert paint(model, guidance_scale=1.0).row_forwards == 10 and paint(model).row_forwards == 20


def test_steps_set_the_number_of_groups() -> None:
    model, diagonal = tiny_lpd(), samplers.create("groups", order="diagonal")
    assert paint(model, steps=3).nfe == 3 and paint(model, steps=3, sampler="lpd").nfe == 3
    assert paint(model, steps=16).accepted.max() == 1
    assert paint(model, sampler=samplers.create("groups", order="cosine"), steps=6).nfe == 6
    refuses(lambda: paint(model, sampler=diagonal, steps=3), "steps=3 has no meaning")
    refuses(lambda: paint(model, steps=17), "sizes=17 must be an integer from 1 to 16")


def test_defaults_have_the_published_guidance_and_repulsion() -> None:
    with torch.device("meta"):
        large, largest = (LPD(LPDConfig(**PRESETS[name])) for name in ("lpd_l", "lpd_xxl"))
    model = LPDModel(large)
    assert model.defaults_with(samplers.create("groups"))["guidance_scale"] == 4.8
    assert model.defaults_with(samplers.create("groups", order={"order": "lpd", "sizes": 32}))["guidance_scale"] == 5.4
    assert GUIDANCE[1280][1024, 48] == 6.0

    repulsions = []

    @dataclass(frozen=True)
    class RecordingGroups(Groups):
        def start(self, *args: Any, **kwargs: Any) -> Any:
            repulsions.append(self.order.repulsion)

    model = LPDModel(largest)
    for order in ("lpd", {"order": "lpd", "sizes": 32}, {"order": "lpd", "repulsion": 1}):
        sampler, grid = RecordingGroups(order), model.grid()
        model.begin(sampler, model.request([1], grid), grid, paradec.Request(sampler=sampler))
    assert repulsions == [3.0, None, 1]
