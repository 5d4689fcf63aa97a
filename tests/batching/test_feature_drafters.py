"""Drafters that read hidden states, in batches whose rows come and go: each row as alone, whatever its neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from places import GOLDEN

import paradec
from paradec.batching import Batch
from paradec.models.base import Model
from paradec.samplers.causal.trees import DynamicTree

SOURCE = GOLDEN / "drafters" / "drafters"
SHARED = [7, 8, 9, 10] * 5
PROMPTS = [[5, 9, 2, 40, 7], [11], [3, 1], [*range(20, 31)], [*SHARED, 1], [*SHARED, 2], [6], [*SHARED, 3, 4]]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("eagle3-original", {}),
    ("eagle3-speculators", {"tree": (3, 2, 1)}),
    ("eagle3-speculators", {"tree": DynamicTree(8, 3, 3), "rule": "naive"}),
    ("dflash2-zlab", {}),
    ("dspark-rnn", {}),
    ("../mtp-2/model", {}),
]


@pytest.fixture(scope="module")
def base() -> Model:
    return paradec.load(SOURCE / "base", dtype=torch.float64)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=["chain", "tree", "dynamic", "dflash2", "dspark", "mtp"])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_rows_that_come_and_go_are_as_alone(name: str, settings: dict[str, Any], scale: float, base: Model) -> None:
    if name.startswith("d"):
        pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")
    kind = "mtp" if "mtp" in name else None
    base = base if kind is None else paradec.load(SOURCE / name, dtype=torch.float64)
    drafter = paradec.load_drafter(SOURCE / name, base=base, kind=kind)
    sampler = paradec.samplers.Speculative(drafter=drafter, **settings)
    request = {"sampler": sampler, "temperature": 0.9, "guidance_scale": scale}
    new = [9, 4, 12, 7, 5, 9, 3, 6]
    with Batch(base, batch_size=3, **request) as batch:
        tickets = [batch.add(prompt, seed=row, max_new_tokens=new[row]) for row, prompt in enumerate(PROMPTS)]
        while not all(ticket.done for ticket in tickets):
            batch.step()
    for row, (prompt, ticket) in enumerate(zip(PROMPTS, tickets, strict=True)):
        alone = paradec.generate(base, [prompt], seed=row, max_new_tokens=new[row], **request)
        assert ticket.output is not None
        assert ticket.output.new_tokens[0].tolist() == alone.new_tokens[0].tolist()
        assert ticket.output.row_nfe == alone.row_nfe
