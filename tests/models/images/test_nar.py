"""NAR: the reference's cases, the cache against one masked forward, files, requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from images import tiny_nar
from recorded import assert_checksum, image_case, image_cases, replays
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec.core import rng
from paradec.core.protocol import decode
from paradec.core.query import Query
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.grid import Grid
from paradec.models.images.llamagen import load_llamagen
from paradec.models.images.nar import NAR, NARConfig, NARModel, load_nar
from paradec.samplers.pictures.nar import diagonal


def golden_model(name: str, grid: int, dtype: torch.dtype = torch.float32) -> NARModel:
    config, weights = image_case("nar", f"{name}.config")
    arguments = {"num_classes": config["num_classes"]}
    if config["model_type"] == "t2i":
        arguments = {"caption_length": config["cls_token_num"], "caption_dim": config["caption_dim"]}
    sizes = {key: config[key] for key in ("dim", "n_layer", "n_head", "vocab_size", "rope_base", "norm_eps")}
    arguments |= {"ffn_dim": config["ffn_hidden"], "condition": config["model_type"]}
    module = NAR(NARConfig(**sizes, **arguments, grid=grid))
    module.load_state_dict(weights)
    return NARModel(module.to(dtype))


@pytest.mark.thinned
@pytest.mark.parametrize("name", image_cases("nar", "steps"))
@replays("name", "nar/")
def test_decoding_equals_the_recorded_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arrays = image_case("nar", name)
    settings, text = case["settings"], "text_mask" in case["settings"]
    dtype = torch.float32 if case["margin"] >= 1e-4 else torch.float64
    model = golden_model(case["model"], settings["grid"], dtype)
    conditions: Any = settings.get("labels")
    if text:
        masks = torch.tensor(settings["text_mask"], dtype=torch.bool)
        conditions = [features[mask] for features, mask in zip(arrays["features"], masks)]
    grid = model.grid()
    inputs = model.request(conditions, grid)
    sampler = paradec.samplers.create("nar", cfg_interval=settings["cfg_interval"])
    guidance = {"negative_prompt": inputs.unconditional, "guidance_scale": settings["cfg"]}
    filters = {"top_k": settings["top_k"] or None, "top_p": settings["top_p"]}
    temperature = settings["temperature"] if settings["sample"] else 0
    state = sampler.start(inputs.model, inputs.prompts, **guidance, **filters, temperature=temperature, seed=0)
    is_seeded = "manual_seed" in case["draws"]
    for index, step in enumerate(case["steps"]):
        if "u" in step:
            u = torch.tensor(step["u"], dtype=torch.float64).unsqueeze(-1)
            monkeypatch.setattr(rng, "uniform", lambda *args, u=u: u)
        (query,) = sampler.query(state)
        proposal = sampler.propose(state, [inputs.model(query, state.store)], [query])
        offsets = [position - step["positions"][0] for position in step["positions"]]
        assert not index or (query.positions[0] - int(query.positions.min())).tolist() == offsets
        logits, averaged = proposal.quantities["logits"], proposal.quantities["averaged"]
        assert_checksum(logits, step["guided_logits"])
        if len(averaged) == step["rows"]:  # otherwise the reference evaluates an unused unconditional half too
            assert_checksum(averaged, step["averaged_logits"])
        for key, values in (("guided_logits", logits), ("averaged_logits", averaged[: step["rows"]])):
            if (expected := arrays.get(f"{key}.{index}")) is not None:
                assert (values - expected[: len(values)]).abs().max() < 1e-4
        if not text and query.branches * state.batch == step["rows"]:  # the reference evaluates padded captions
            assert query.tokens.tolist() == step["input_tokens"] or step["input_tokens"] is None
            store, count = state.store, 1 + grid.length
            for layer, pair in enumerate(step["kv"]):
                for stored, expected in zip((store.layer_keys[layer], store.layer_values[layer]), pair, strict=True):
                    assert_checksum(stored[:, :count].transpose(1, 2), expected)
        if is_seeded:
            proposal.values = torch.tensor(step["tokens"])
        assert proposal.values.tolist() == step["tokens"]
        sampler.commit(state, proposal)
    assert state.done and state.nfe.tolist() == [case["calls"]] * state.batch
    assert model.read(state, grid).tokens.tolist() == case["codes"]


@pytest.mark.parametrize("name", image_cases("nar", "mask"))
@replays("name", "nar/")
def test_the_mask_and_one_forward_equal_the_reference(name: str) -> None:
    case, arrays = image_case("nar", name)
    model = golden_model(case["model"], case["grid"])
    labels = torch.tensor(case["labels"]).unsqueeze(1)
    tokens = torch.cat((labels + model.facts.vocab_size, torch.tensor(case["codes"])), 1)
    query = Query(np.arange(len(tokens)), tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    assert torch.equal(model._visible(query)[0, 0].int(), torch.tensor(case["mask"], dtype=torch.int))
    assert (cell_logits(model(query), model.grid(), 1) - arrays["logits"]).abs().max() < 1e-4


def cell_logits(heads: Tensor, grid: Grid, prompt: int) -> Tensor:
    """Return logits [B, N, V] of the cells in raster order from heads [B, prompt + N, 2, V], by the paper's formula."""
    result = []
    for cell in range(grid.length):
        i, j = divmod(cell, grid.width)
        predictions = [heads[:, prompt + cell - 1, 0]] if j else []
        predictions += [heads[:, prompt + cell - grid.width, 1]] if i else []
        predictions = predictions or [heads[:, prompt - 1, 0], heads[:, prompt - 1, 1]]
        result.append(sum(predictions) / len(predictions))
    return torch.stack(result, 1)


@pytest.mark.parametrize("condition", ["c2i", "t2i"])
@pytest.mark.parametrize("side", [1, 2, 5])
def test_cached_decoding_equals_one_masked_forward(condition: str, side: int) -> None:
    model = tiny_nar(condition, grid=side)
    grid = model.grid()
    captions = [torch.linspace(-1, 1, length * 16).view(length, 16).double() for length in (5, 2)]
    inputs = model.request([3, 9] if condition == "c2i" else captions, grid)
    sampler = paradec.samplers.create("nar")
    state = sampler.start(inputs.model, inputs.prompts, guidance_scale=1, seed=1)
    cached = torch.zeros(2, grid.length, model.facts.vocab_size).double()
    while not state.done:
        proposal = sampler.step(inputs.model, state)
        cached[:, diagonal(grid, state.index)] = proposal.quantities["logits"]
        sampler.commit(state, proposal)
    for row, length in enumerate(state.prompt_length):
        # one forward without a store, with shuffled cells and padding
        count = int(length) + grid.length
        order = torch.cat((torch.arange(length), length + torch.randperm(grid.length)))
        pad = torch.zeros(2, dtype=torch.int64)  # at position 0, which is visible to all cells
        tokens = torch.cat((state.canvas[row, :count][order], pad)).unsqueeze(0)
        positions, valid = torch.cat((order, pad)).unsqueeze(0), (torch.arange(count + 2) < count).unsqueeze(0)
        query = Query(np.array([row]), tokens, positions, valid=valid)
        actual = cell_logits(inputs.model(query)[:, :count][:, order.argsort()], grid, int(length))
        torch.testing.assert_close(actual[0], cached[row], atol=1e-12, rtol=0)


def test_guidance_ends_after_its_interval() -> None:
    model = tiny_nar()
    inputs = model.request([3], model.grid())
    sampler = paradec.samplers.create("nar", cfg_interval=2)  # 1 and 3 tokens precede diagonals 1 and 2
    arguments: dict[str, Any] = {"negative_prompt": inputs.unconditional, "seed": 4}
    state = decode(sampler, model, sampler.start(model, inputs.prompts, guidance_scale=3.0, **arguments))
    assert state.row_forwards.tolist() == [2 * 2 + 5] and state.nfe.tolist() == [7]
    plain = decode(sampler, model, sampler.start(model, inputs.prompts, guidance_scale=1.0, seed=4))
    assert plain.row_forwards.tolist() == [7]
    # scales up to 1 turn guidance off, like in the public code
    half = decode(sampler, model, sampler.start(model, inputs.prompts, guidance_scale=0.5, **arguments))
    assert torch.equal(half.canvas, plain.canvas) and half.row_forwards.tolist() == [7]
    for scale in (3.0, 1.0):
        never = paradec.samplers.create("nar")
        state = decode(never, model, never.start(model, inputs.prompts, guidance_scale=scale, **arguments))
        assert state.row_forwards.tolist() == [7 * (2 if scale > 1 else 1)]


def save(model: NARModel, folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    config = model.module.config
    sizes = {name: getattr(config, name) for name in config.__dataclass_fields__}
    (folder / "config.json").write_text(json.dumps({"model_type": "nar", **sizes, **fields}))
    save_file(model.module.state_dict(), folder / "model.safetensors")
    return folder


def test_checkpoints_load(tmp_path: Path) -> None:
    model = tiny_nar()
    weights = model.module.state_dict()
    expected = paradec.generate_images(model, class_labels=[1, 2], seed=0, output_type="latent").tokens
    loaded = paradec.load(save(model, tmp_path / "folder", defaults={"guidance_scale": 2.0}), dtype="float64")
    assert isinstance(loaded, NARModel) and loaded.defaults["guidance_scale"] == 2.0
    save_file(weights, tmp_path / "c2i_B_256.safetensors")
    for nested in ("model", "module", "state_dict", None):
        torch.save({nested: weights} if nested else weights, tmp_path / "c2i_B_256.pt")
        actual = paradec.load(tmp_path / "c2i_B_256.pt", n_head=4, grid=4, dtype="float64")
        assert isinstance(actual, NARModel) and actual.module.config.n_layer == 2
        tokens = paradec.generate_images(actual, class_labels=[1, 2], seed=0, output_type="latent").tokens
        assert torch.equal(tokens, expected)
    assert load_nar(tmp_path / "c2i_B_256.safetensors", n_head=4).module.config.grid == 16


@pytest.mark.parametrize("missing", [("medusa_norm.weight",), ("medusa_norm.weight", "medusa_output.weight")])
def test_files_without_the_second_head_are_refused(missing: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_nar()
    weights = {name: tensor for name, tensor in model.module.state_dict().items() if name not in missing}
    file = tmp_path / "t2i_XL_stage1_256.pt"
    torch.save(weights, file)
    refuses(lambda: load_nar(file, n_head=4), f"holds no NAR: it lacks {', '.join(missing)}", CheckpointError)
    if len(missing) == 1:  # medusa_output.weight still marks the file as NAR's
        refuses(lambda: paradec.load(file, n_head=4), "holds no NAR", CheckpointError)
    folder = save(model, tmp_path / "folder")
    save_file(weights, folder / "model.safetensors")
    refuses(lambda: paradec.load(folder), "holds no NAR", CheckpointError)
    torch.save(model.module.state_dict(), file)
    refuses(lambda: load_llamagen(file, n_head=4), "unexpected.*medusa_norm", CheckpointError)
