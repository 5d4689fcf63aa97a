"""NAR: the reference's cases, the cache against one masked forward, files, requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import tiny_nar
from next_image import cases, checksum, close, read
from safetensors.torch import save_file
from torch import Tensor

import paradec
from paradec import rng
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.grid import Grid
from paradec.models.images.nar import NAR, NARConfig, NARModel, load_nar
from paradec.protocol import Query, decode
from paradec.samplers.groups.nar import diagonal

NAMES = cases("nar", "nar")


def golden_model(name: str, grid: int, dtype: torch.dtype = torch.float32) -> NARModel:
    config, weights = read("nar", f"{name}.config")
    given = {"num_classes": config["num_classes"]}
    if config["model_type"] == "t2i":
        given = {"caption_length": config["cls_token_num"], "caption_dim": config["caption_dim"]}
    sizes = {key: config[key] for key in ("dim", "n_layer", "n_head", "vocab_size", "rope_base", "norm_eps")}
    own = NARConfig(**sizes, **given, ffn_dim=config["ffn_hidden"], condition=config["model_type"], grid=grid)
    module = NAR(own)
    module.load_state_dict(weights)
    return NARModel(module.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_replays_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arrays = read("nar", name)
    settings, text = case["settings"], "text_mask" in case["settings"]
    dtype = torch.float32 if case["margin"] >= 1e-4 else torch.float64
    model = golden_model(case["model"], settings["grid"], dtype)
    given: Any = settings.get("labels")
    if text:
        mask = torch.tensor(settings["text_mask"], dtype=torch.bool)
        given = [features[kept] for features, kept in zip(arrays["features"], mask)]
    grid = model.grid()
    laid = model.request(given, grid)
    sampler = paradec.samplers.create("nar", cfg_interval=settings["cfg_interval"])
    state = sampler.start(
        laid.model,
        laid.prompts,
        negative_prompt=laid.unconditional,
        guidance_scale=settings["cfg"],
        temperature=settings["temperature"] if settings["sample"] else 0,
        top_k=settings["top_k"] or None,
        top_p=settings["top_p"],
        seed=0,
    )
    seeded = "manual_seed" in case["draws"]
    for index, step in enumerate(case["steps"]):
        if "u" in step:
            u = torch.tensor(step["u"], dtype=torch.float64).unsqueeze(-1)
            monkeypatch.setattr(rng, "uniform", lambda *args, u=u: u)
        (query,) = sampler.query(state)
        proposal = sampler.propose(state, [laid.model(query, state.store)], [query])
        logits, averaged = proposal.quantities["logits"], proposal.quantities["averaged"]
        assert close(logits, step["guided_logits"])
        if len(averaged) == step["rows"]:  # the reference evaluates the unconditional half that has no say
            assert close(averaged, step["averaged_logits"])
        for key, found in (("guided_logits", logits), ("averaged_logits", averaged[: step["rows"]])):
            if (expected := arrays.get(f"{key}.{index}")) is not None:
                assert (found - expected[: len(found)]).abs().max() < 1e-4
        if not text and query.branches * state.batch == step["rows"]:  # the reference keeps padded captions
            assert query.tokens.tolist() == step["input_tokens"] or step["input_tokens"] is None
            store, count = state.store, 1 + grid.length
            for layer, pair in enumerate(step["kv"]):
                for kept, expected in zip((store.layer_keys[layer], store.layer_values[layer]), pair, strict=True):
                    assert close(kept[:, :count].transpose(1, 2), expected)
        if seeded:
            proposal.values = torch.tensor(step["tokens"])
        assert proposal.values.tolist() == step["tokens"]
        sampler.commit(state, proposal)
    assert state.done and state.nfe.tolist() == [case["calls"]] * state.batch
    assert model.read(state, grid).tokens.tolist() == case["codes"]


def test_the_mask_and_one_forward_are_the_reference_s() -> None:
    case, arrays = read("nar", "forward-00")
    model = golden_model(case["model"], case["grid"])
    query = whole(model, torch.tensor(case["labels"]), torch.tensor(case["codes"]))
    assert torch.equal(model._visible(query)[0, 0].int(), torch.tensor(case["mask"], dtype=torch.int))
    found = of_cells(model(query), model.grid(), 1)
    assert (found - arrays["logits"]).abs().max() < 1e-4


def whole(model: NARModel, labels: Tensor, codes: Tensor) -> Query:
    """One call of class and all cells."""
    tokens = torch.cat((labels.unsqueeze(1) + model.facts.vocab_size, codes), 1)
    return Query(np.arange(len(tokens)), tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


def of_cells(heads: Tensor, grid: Grid, prompt: int) -> Tensor:
    """[B, T + N, 2, V] -> the logits of the cells row by row [B, N, V], cell by cell as the paper says it."""
    found = []
    for cell in range(grid.length):
        i, j = divmod(cell, grid.width)
        said = [heads[:, prompt + cell - 1, 0]] if j else []
        said += [heads[:, prompt + cell - grid.width, 1]] if i else []
        said = said or [heads[:, prompt - 1, 0], heads[:, prompt - 1, 1]]
        found.append(sum(said) / len(said))
    return torch.stack(found, 1)


@pytest.mark.parametrize("condition", ["c2i", "t2i"])
@pytest.mark.parametrize("side", [1, 2, 5])
def test_cached_decoding_is_one_masked_forward(condition: str, side: int) -> None:
    model = tiny_nar(condition, grid=side)
    grid = model.grid()
    captions = [torch.linspace(-1, 1, length * 16).view(length, 16).double() for length in (5, 2)]
    laid = model.request([3, 9] if condition == "c2i" else captions, grid)
    sampler = paradec.samplers.create("nar")
    state = sampler.start(laid.model, laid.prompts, guidance_scale=1, seed=1)
    cached = torch.zeros(2, grid.length, model.facts.vocab_size).double()
    while not state.done:
        proposal = sampler.step(laid.model, state)
        cached[:, diagonal(grid, state.index)] = proposal.quantities["logits"]
        sampler.commit(state, proposal)
    for row, length in enumerate(state.prompt_length):
        # without the store, with the cells in any order, and behind padding
        count = int(length) + grid.length
        order = torch.cat((torch.arange(length), length + torch.randperm(grid.length)))
        tokens, positions = state.canvas[row, :count][order], order
        pad = torch.zeros(2, dtype=torch.int64)
        query = Query(
            np.array([row]),
            torch.cat((tokens, pad)).unsqueeze(0),
            torch.cat((positions, pad + count - 1)).unsqueeze(0),
            valid=(torch.arange(count + 2) < count).unsqueeze(0),
        )
        heads = laid.model(query)[:, :count]
        found = of_cells(heads[:, order.argsort()], grid, int(length))
        torch.testing.assert_close(found[0], cached[row], atol=1e-12, rtol=0)
