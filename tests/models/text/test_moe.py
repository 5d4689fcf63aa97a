"""Mixtures of experts: loading, and the logits of their published code."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from moe_models import MASK, MOE, NAMES, forwards, golden_moe, told
from places import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor

import paradec
from paradec import caches
from paradec.models.adapter import Model
from paradec.protocol import Query

TOLERANCE = 2e-4
"""Of the golden logits, in float32. The smallest of the mistakes that were tried moves them by 4e-2."""
MODULES = {
    "llada2-tiny": "Glm4MoeForCausalLM",
    "llada-moe-tiny": "Qwen3MoeForCausalLM",
    "sdar-moe-tiny": "Qwen3MoeForCausalLM",
}
BLOCK_CAUSAL = ("llada2-tiny", "sdar-moe-tiny")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 20], [21]]
EXACT = sorted({"prefix", "dual", "block"} & set(caches.names()))
"""Caches that lose nothing on a block-causal model decoded in its own blocks."""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(MOE / name / "forwards.safetensors")


def cases(name: str, *kinds: str) -> list[dict[str, Any]]:
    found = [case for case in forwards(name)["cases"] if case["kind"] in kinds]
    assert found
    return found


def edited(folder: Path, name: str, weights: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """A copy of a golden checkpoint with other fields in config.json (`...` takes one out) or other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MOE / name / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    if weights is None:
        shutil.copyfile(MOE / name / "model.safetensors", folder / "model.safetensors")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


# ---- logits --------------------------------------------------------------------------------------------------------


def blocks(case: dict[str, Any], length: int) -> Tensor:
    """[1, T, T] bool: which column sees which, blocks counted from column 0 whatever the position ids."""
    block = torch.arange(length) // case["block_length"]
    return (block[:, None] >= block[None, :]).unsqueeze(0)


def logits_of(model: Model, case: dict[str, Any]) -> Tensor:
    ids = torch.tensor(case["input_ids"])
    rows, length = ids.shape
    positions = torch.tensor(case["position_ids"]) if "position_ids" in case else torch.arange(length).expand_as(ids)
    valid = visible = None
    if case["kind"] == "block_causal":
        visible = None if "position_ids" not in case else blocks(case, length).expand(rows, -1, -1)
    elif case["kind"] == "padded":
        valid = torch.tensor(case["attention_mask"]).bool()
    elif model.facts.topology == "block_causal":
        visible = torch.ones(rows, length, length, dtype=torch.bool)
    query = Query(rows=np.arange(rows), tokens=ids, positions=positions, valid=valid, visible=visible)
    return model(query)


def test_facts(name: str) -> None:
    model, facts = golden_moe(name), forwards(name)["facts"]
    assert type(model.module) is getattr(transformers, MODULES[name])
    assert (model.facts.mask_token_id, model.facts.eos_token_ids) == (facts["mask"], (facts["eos"],))
    assert model.facts.prediction == "same"
    assert model.facts.topology == ("block_causal" if name in BLOCK_CAUSAL else "bidirectional")
    assert model.facts.block_length == (facts["block"] if name in BLOCK_CAUSAL else None)
    assert model.supports_store and model.pads
    assert model.module.config._experts_implementation == "grouped_mm"  # not transformers' loop over the experts


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in NAMES for kind in ("full", "block_causal" if name in BLOCK_CAUSAL else "padded")],
)
def test_logits(name: str, kind: str) -> None:
    expected = tensors(name)
    for case in cases(name, kind):
        model = golden_moe(name, block_length=case.get("block_length")) if kind == "block_causal" else golden_moe(name)
        difference = (logits_of(model, case) - expected[case["name"]]).abs()
        if kind == "padded":
            difference = difference[torch.tensor(case["attention_mask"]).bool()]
        assert difference.max() < TOLERANCE, case["name"]


def test_logits_of_unequal_rows_in_one_batch(name: str) -> None:
    """Padding and neighbours change neither the routing nor the result."""
    expected = tensors(name)
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases(name, "full", "block_causal"):
        if "group" in case:
            groups.setdefault(case["group"], []).append(case)
    assert groups
    for members in groups.values():
        rows = [case["input_ids"][0] for case in members]
        lengths, width = [len(row) for row in rows], max(map(len, rows))
        ids = torch.full((len(rows), width), MASK)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        valid = torch.arange(width) < torch.tensor(lengths)[:, None]
        block = members[0].get("block_length")
        model = golden_moe(name, block_length=block) if block else golden_moe(name)
        visible = None
        if block is None and model.facts.topology == "block_causal":
            visible = torch.ones(len(rows), width, width, dtype=torch.bool)
        positions = torch.arange(width).expand_as(ids)
        query = Query(rows=np.arange(len(rows)), tokens=ids, positions=positions, valid=valid, visible=visible)
        found = model(query)
        for row, case in enumerate(members):
            difference = (found[row, : lengths[row]] - expected[case["name"]][0]).abs().max()
            assert difference < TOLERANCE, case["name"]


@pytest.mark.parametrize("name", BLOCK_CAUSAL)
def test_logits_over_a_store(name: str) -> None:
    expected = tensors(name)
    for case in cases(name, "cached"):
        model = golden_moe(name, block_length=case["block_length"])
        length = max(call["start"] + len(call["input_ids"][0]) for call in case["calls"])
        rows = len(case["calls"][0]["input_ids"])
        store = model.make_store(rows, length)
        for call in case["calls"]:
            ids = torch.tensor(call["input_ids"])
            positions = (call["start"] + torch.arange(ids.shape[1])).expand_as(ids)
            slots = positions if call["stored"] else None
            where = {"store_rows": torch.arange(rows), "slots": slots, "reach": length}
            found = model(Query(rows=np.arange(rows), tokens=ids, positions=positions, kind="window", **where), store)
            assert (found - expected[call["logits"]]).abs().max() < TOLERANCE, call["logits"]


def test_hidden_states_and_routing(name: str) -> None:
    """Every layer's output, and what the router of one layer chooses and weighs."""
    model, expected = golden_moe(name), tensors(name)
    (hidden,), (router,) = cases(name, "hidden"), cases(name, "router")
    block: Any = model.module.model.layers[router["layer"]].mlp
    seen: dict[str, Any] = {}

    def keep(what: str) -> Any:
        return lambda module, args, output: seen.update({what: (args[0], output)})

    layers = list(model.module.model.layers)
    hooks = [layer.register_forward_hook(keep(f"layer {at}")) for at, layer in enumerate(layers)]
    hooks += [block.gate.register_forward_hook(keep("gate")), block.register_forward_hook(keep("block"))]
    hooks.append(model.module.model.norm.register_forward_hook(keep("norm")))
    try:
        logits_of(model, hidden | {"kind": "full"})
    finally:
        for hook in hooks:
            hook.remove()
    close = {"rtol": 0, "atol": 5e-5}
    names = hidden["tensors"]
    for at, key in enumerate(names[: len(layers)]):
        torch.testing.assert_close(seen[f"layer {at}"][0], expected[key], **close)
    torch.testing.assert_close(seen["norm"][1], expected[names[-1]], **close)
    wanted = {key: expected[key] for key in router["tensors"]}
    _, weights, indices = seen["gate"][1]
    width = wanted["router_input"].shape[-1]
    torch.testing.assert_close(seen["block"][0].view(-1, width), wanted["router_input"], **close)
    torch.testing.assert_close(seen["block"][1].view(-1, width), wanted["router_output"], **close)
    order = indices.argsort(-1)
    assert torch.equal(indices.gather(-1, order).long(), wanted["router_indices"].long())
    torch.testing.assert_close(weights.gather(-1, order), wanted["router_weights"], **close)
