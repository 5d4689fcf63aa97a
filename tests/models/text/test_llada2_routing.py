"""LLaDA2.2 (`tests/golden/autumn/llada22`): experts chosen for whole blocks, its format, and errors."""

import copy
import functools
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from places import GOLDEN
from recorded import golden, read_arrays, read_json, read_json_unrecorded, replay
from torch import Tensor

import paradec
from paradec.core.query import StoreCall, WindowLogits, WindowQuery

LLADA22 = GOLDEN / "autumn" / "llada22" / "llada22-tiny"
FORWARDS = [
    path
    for path in sorted(golden("autumn").glob("**/forwards.json"))
    if read_json_unrecorded(path)["schema"].startswith("paradec-golden-llada22/")
]


@functools.cache
def load_model(folder: Path) -> Any:
    facts = read_json(folder / "forwards.json")["facts"]
    return paradec.load(folder, mask_token_id=facts["mask"], block_length=facts["block"])


@pytest.fixture(scope="module")
def llada22() -> Any:
    return load_model(LLADA22)


def cases_of_kind(kind: str) -> list[Any]:
    return [
        pytest.param(path, number, id=f"{path.parent.name}-{case['name']}")
        for path in FORWARDS
        for number, case in enumerate(read_json_unrecorded(path)["cases"])
        if case["kind"] == kind
    ]


@pytest.mark.parametrize("path", FORWARDS, ids=lambda path: path.parent.name)
def test_facts_equal_the_recorded_ones(path: Path) -> None:
    facts, model = read_json(path)["facts"], load_model(path.parent)
    with replay(f"{path.parent.name}, facts"):
        assert sorted(model.facts.eos_token_ids) == sorted(facts["stops"])
        assert (model.facts.delete_token_id, model.facts.split_token_id) == (facts["delete"], facts["split"])


def call(model: Any, ids: list[list[int]], start: int = 0, store: Any = None) -> Tensor:
    width = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    valid = torch.arange(width) < torch.tensor([[len(row)] for row in ids])
    positions = (start + torch.arange(width)).expand(len(ids), -1)
    rows = np.arange(len(ids))
    query = WindowQuery(rows=rows, tokens=tokens, positions=positions, valid=valid, window=WindowLogits(rows))
    if store is not None:
        query.store = StoreCall(torch.as_tensor(rows), positions, rows, start + width)
        return model(query, store)
    return model(query)


def read_case(path: Path, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return read_json(path)["cases"][number], read_arrays(path.with_suffix(".safetensors"))


@pytest.mark.parametrize(("path", "number"), cases_of_kind("block_causal"))
def test_logits_equal_the_recorded_ones(path: Path, number: int) -> None:
    case, tensors = read_case(path, number)
    model = load_model(path.parent)
    with replay(f"{path.parent.name}, {case['name']}"):
        expected, ids = tensors[case["name"]], case["input_ids"]
        alone = call(model, [ids])[0]
        batched = call(model, [ids[:3], ids, [*ids, *ids]])[1, : len(ids)]
        assert (alone - expected).abs().max() < 2e-4 and (batched - expected).abs().max() < 2e-4


@pytest.mark.parametrize(("path", "number"), cases_of_kind("cached"))
def test_logits_over_a_store_equal_the_recorded_ones(path: Path, number: int) -> None:
    case, tensors = read_case(path, number)
    model = load_model(path.parent)
    with replay(f"{path.parent.name}, {case['name']}"):
        store = model.make_store(1, 64)
        for each in case["calls"]:
            actual = call(model, [each["input_ids"]], each["start"], store)[0]
            assert (actual - tensors[each["logits"]]).abs().max() < 2e-4


@pytest.mark.parametrize(("path", "number"), cases_of_kind("router"))
def test_routing_equals_the_recorded_one(path: Path, number: int) -> None:
    case, tensors = read_case(path, number)
    with replay(f"{path.parent.name}, {case['name']}"):
        assert_routed(load_model(path.parent), case, tensors)


def assert_routed(llada22: Any, case: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = case["name"]
    logits, bias = tensors[f"{name}_logits"].double(), tensors[f"{name}_bias"].double()
    router = copy.deepcopy(next(part for part in llada22.module.modules() if hasattr(part, "capacity"))).double()
    experts = logits.shape[1]
    router.hidden_dim, router.top_k, router.num_experts = experts, case["num_experts_per_tok"], experts
    router.capacity, router.block = case["expert_capacity"], case["block_size"]
    router.routed_scaling_factor = case["routed_scaling_factor"]
    router.weight = torch.nn.Parameter(torch.eye(experts, dtype=torch.float64))
    router.e_score_correction_bias = bias
    _, weights, chosen = router(logits.unsqueeze(0))
    ids, order = chosen.sort(-1)
    assert ids.tolist() == tensors[f"{name}_ids"].tolist()
    torch.testing.assert_close(weights.gather(1, order).float(), tensors[f"{name}_weights"].float(), rtol=0, atol=1e-5)


def test_partial_blocks_are_refused(llada22: Any) -> None:
    for request, message in (
        ({"cache": "dual"}, "chooses experts for whole blocks; the cache cuts these: use 'block'"),
        ({"sampler": "s2d2"}, "additional masks.*chooses experts for whole blocks"),
        ({"sampler": "freedave"}, "several drafts.*chooses experts for whole blocks"),
        ({"sampler": "self_speculative"}, "it chooses experts for whole blocks"),
    ):
        refuses(partial(paradec.generate, llada22, [[1, 2, 3]], max_new_tokens=4, **request), message)


@pytest.mark.parametrize(("fields", "message"), [
    ({"expert_capacity": 3}, "expert_capacity=3"),
    ({"expert_capacity": 99}, "expert_capacity=99"),
    ({"expert_capacity": 0}, "expert_capacity"),
    ({"block_size": None}, "block_size"),
    ({"delete_token_id": 96}, "delete_token_id=96"),
    ({"split_token_id": "x"}, "split_token_id='x'"),
])  # fmt: skip
def test_wrong_fields_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = tmp_path / "LLaDA2.2-mini"
    shutil.copytree(LLADA22, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    assert "\n" not in refuses(lambda: paradec.load(folder, mask_token_id=95), message, paradec.CheckpointError)
