"""SGLang's class for LLaDA2.2 (`tests/golden/autumn/indel`): 60 recorded blocks, step by step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from places import golden
from safetensors.torch import load_file
from torch import Tensor

import paradec
from paradec.core.facts import ModelFacts
from paradec.core.query import Query

INDEL = golden("autumn") / "indel"
CASES = json.loads((INDEL / "cases.json").read_text())["cases"]


class Recorded:
    """A model that answers with a file's logits [rows, B, V], whatever it is asked."""

    tokenizer, default_max_new_tokens, default_block_length = None, 8, None
    pads = supports_store = supports_visibility = True
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, case: dict[str, Any]):
        self.facts = ModelFacts(
            case["vocab_size"],
            mask_token_id=case["mask_id"],
            topology="block_causal",
            block_length=case["block_length"],
            delete_token_id=case["delete_token_id"],
            split_token_id=case["split_token_id"],
        )
        self.logits: Tensor

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        assert query.wanted is not None
        own = self.logits[torch.as_tensor(query.rows)]
        at = query.positions.gather(1, query.wanted) - self.facts.block_length
        return own.gather(1, at.unsqueeze(2).expand(-1, -1, own.shape[2])).clone()


@pytest.fixture(scope="module")
def logits() -> dict[str, Tensor]:
    return load_file(INDEL / "logits.safetensors")


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_recorded_steps(case: dict[str, Any], logits: dict[str, Tensor]) -> None:
    model, used = Recorded(case), case["used"]
    sampler = paradec.samplers.create(
        "levenshtein",
        threshold=used["threshold"],
        editing_threshold=used["edit_threshold"],
        max_post_steps=used["max_post_edit_steps"],
    )
    block = case["block_length"]
    rows = [
        [token for token, given in zip(*each, strict=True) if given]
        for each in zip(case["ids"], case["given"], strict=True)
    ]
    assert all(given == sorted(given, reverse=True) for given in case["given"])
    for row, ids in enumerate(case["ids"]):  # rows one by one: they end at different steps
        prompt = [0] * block + rows[row]  # a block before it, since no prompt is empty
        state = sampler.start(model, [prompt], max_new_tokens=2 * block - len(prompt), eos_early_stop=False)
        assert state.canvas[0, block:].tolist() == ids
        for step in case["steps"]:
            model.logits = logits[case["name"]][step["logits"]].view(len(rows), block, -1)[row : row + 1]
            if state.done:
                assert step["closed"][row] or step["done"][row]
                assert state.canvas[0, block:].tolist() == step["ids"][row]
                continue
            sampler.commit(state, sampler.step(model, state))
            assert state.canvas[0, block:].tolist() == step["ids"][row], step
            assert state.done == (step["closed"][row] or step["done"][row])
            if not state.done:
                assert state.memory["post_steps"].tolist() == [step["post_steps"][row]]
                assert state.memory["original"][0].tolist() == [
                    bool(flag) for flag in step["original"][row][len(rows[row]) :]
                ]
        assert state.done
