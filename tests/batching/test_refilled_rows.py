"""A row that takes the slot of one that has ended decodes what `generate` decodes, in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from batches import forgotten
from fitting import taken
from tiny_models import VOCAB, tiny

import paradec
from paradec import caches, samplers
from paradec.batching.batch import Batch
from paradec.batching.slots import Ticket
from paradec.caches.table import REFUSED, verdict
from paradec.core.facts import ModelFacts
from paradec.core.rows import select_rows
from paradec.models.adapter import Model
from paradec.models.own_drafts import OwnDrafts
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.causal.drafts.text import PromptLookup, TokenRecycling
from paradec.samplers.causal.jacobi import Jacobi
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.speculative import Speculative

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked" and name != "mar"]
CAUSAL = [name for name in samplers.names() if samplers.get(name).family == "draft_verify"]
TOPOLOGY = {"bidirectional same": ("bidirectional", "same"), "bidirectional shifted": ("bidirectional", "shifted")}
TOPOLOGY |= {"block_causal same": ("block_causal", "same"), "block_causal shifted": ("block_causal", "shifted")}
pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:steps=")


def works(sampler: str, cache: str, kind: str) -> bool:
    topology, prediction = TOPOLOGY[kind]
    length = 4 if topology == "block_causal" else None
    facts = ModelFacts(vocab_size=2, prediction=prediction, topology=topology, block_length=length)
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


EVERY = [
    (sampler, cache, kind)
    for kind in TOPOLOGY
    for sampler in MASKED
    for cache in caches.names()
    if works(sampler, cache, kind)
]


def some() -> set[tuple[str, str, str]]:
    """Every sampler once and every cache once, on kinds of model that take turns."""
    found = set()
    for index, name in enumerate(MASKED):
        fitting = [entry for entry in EVERY if entry[0] == name]
        found.add(fitting[index * 7 % len(fitting)])
    for index, name in enumerate(caches.names()):
        if not any(entry[1] == name for entry in found):
            fitting = [entry for entry in EVERY if entry[1] == name]
            found.add(fitting[index * 5 % len(fitting)])
    return found


SOME = some()


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {}


def model_of(models: dict[str, Model], kind: str) -> Model:
    if kind not in models:
        topology, prediction = TOPOLOGY.get(kind, ("causal", "shifted"))
        models[kind] = tiny(2, topology=topology, prediction=prediction)
        torch.manual_seed(0)
        codes = torch.randn(VOCAB, 4, dtype=torch.float64)  # methods for pictures compare tokens by their codes
        models[kind].codebook = lambda: codes  # type: ignore[attr-defined]
    return models[kind]


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Of unequal lengths, two of them equal."""
    rows = [[draw.randrange(36) for _ in range(draw.randint(1, 9))] for _ in range(count - 1)]
    return [*rows, rows[1]]


def refilled(model: Model, rows: list[Any], own: list[dict[str, Any]], size: int, **request: Any) -> list[Ticket]:
    """The tickets of prompts with settings of their own, from a batch of so many rows."""
    with Batch(model, batch_size=size, **request) as batch:
        tickets = [batch.add(row, **each) for row, each in zip(rows, own, strict=True)]
        ended: list[Ticket] = []
        while len(ended) < len(rows):
            assert batch.occupied <= size
            ended += batch.step()
        assert batch.occupied == batch.waiting == 0
    assert sorted(ticket.number for ticket in ended) == list(range(len(rows)))
    return tickets


def assert_same(model: Model, rows: list[Any], lengths: list[int], tickets: list[Ticket], **request: Any) -> None:
    """Every answer is that of `generate` on the whole list, and so is what it cost."""
    for new in sorted(set(lengths)):
        whole = paradec.generate(model, rows, max_new_tokens=new, **request)
        for index, ticket in enumerate(tickets):
            if lengths[index] != new:
                continue
            out = ticket.output
            assert out is not None and out.error is None, out
            assert out.new_tokens[0].tolist() == whole.new_tokens[index].tolist(), index
            assert out.row_nfe[0] == whole.row_nfe[index], index
            assert out.tokens[0] == whole.tokens[index] and out.finished[0] == whole.finished[index]
            if out.logprobs is not None:
                mine, theirs = out.logprobs.chosen[0], whole.logprobs.chosen[index][-out.logprobs.chosen.shape[1] :]
                assert torch.allclose(mine, theirs, rtol=0, atol=1e-9, equal_nan=True), index


def assert_rows_are_said(model: Model, rows: list[Any], **request: Any) -> None:
    """No field of a state has the rows that there were: a number of rows that no other size is shows it."""
    sampler = request.pop("sampler")
    sampler = samplers.create(sampler) if isinstance(sampler, str) else sampler
    with torch.inference_mode():
        state = sampler.start(model, [*rows, *rows, *rows[:5]], max_new_tokens=4, **request)
        assert len(state.rows) == 19 and forgotten(state, {19, 38})
        for _ in range(2):
            sampler.commit(state, sampler.step(model, state))
        assert forgotten(select_rows(state, np.array([3, 0, 5])), {19, 38}) == []


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "cache", "kind"),
    [pytest.param(*entry, marks=() if entry in SOME else pytest.mark.full) for entry in EVERY],
)
def test_masked_rows(models: dict[str, Model], name: str, cache: str, kind: str) -> None:
    draw = random.Random(f"{name} {cache} {kind}")
    model = model_of(models, kind)
    rows, lengths = prompts(draw, 7), [draw.choice((4, 8)) for _ in range(7)]
    request = {
        "sampler": name,
        "cache": cache,
        "block_length": 4,
        "temperature": draw.choice((0.0, 0.8)),
        "guidance_scale": draw.choice((1.0, 1.0, 1.5)),
        "seed": draw.randrange(2**31),
        "logprobs": draw.choice((None, 2)) if name != "lopa" else None,  # which has none
    }
    request = taken(name, request)
    assert_rows_are_said(model, rows, **request)
    tickets = refilled(model, rows, [{"max_new_tokens": new} for new in lengths], 3, **request)
    assert_same(model, rows, lengths, tickets, **request)


ALONE = [name for name in CAUSAL if name not in ("zipar", "speculative")]
"""Those that draft for themselves; ZipAR makes pictures, one step for all rows."""
DRAFTING: dict[str, Any] = {
    "chain": {"window": 4},
    "chain that ends where the drafter is unsure": {"window": 6, "stop": Unsure(0.2)},
    "tree": {"tree": (2, 2, 1)},
    "dynamic tree": {"tree": {"nodes": 8, "depth": 3, "top_k": 3}, "rule": "naive"},
}
OWN_STATE = {
    "prompt lookup": Speculative(drafter=PromptLookup(5, 2)),
    "token recycling": Speculative(drafter=TokenRecycling(k=8, tree=(4, 2, 1)), rule="naive"),
    "pool": Jacobi(window=6, pool=3),
    "coupled siblings": SCD(window=6, refresh="maximal", siblings=3, branching=2),
    "siblings of noise": SCD(window=6, refresh="gumbel", siblings=3, branching=2),
}
"""Settings with which a method keeps more of its rows."""


@pytest.mark.thinned
@pytest.mark.parametrize(("temperature", "guidance"), [(0.0, 1.0), (0.8, 1.5)])
@pytest.mark.parametrize("name", [*ALONE, *DRAFTING, *OWN_STATE])
def test_causal_rows(models: dict[str, Model], name: str, temperature: float, guidance: float) -> None:
    model = model_of(models, "causal")
    model.own_drafts = OwnDrafts(4)
    draw = random.Random(f"{name} {temperature} {guidance}")
    rows, lengths = prompts(draw, 7), [draw.choice((3, 9)) for _ in range(7)]
    if name in DRAFTING:
        models.setdefault("drafter", tiny(1, topology="causal", prediction="shifted", seed=1))
        sampler = samplers.create("speculative", drafter=models["drafter"], **DRAFTING[name])
    else:
        sampler = OWN_STATE.get(name) or samplers.create(name, window=5)
    request = {"temperature": temperature, "guidance_scale": guidance, "seed": 5, "logprobs": 1, "sampler": sampler}
    assert_rows_are_said(model, rows, **request)
    tickets = refilled(model, rows, [{"max_new_tokens": new} for new in lengths], 3, **request)
    assert_same(model, rows, lengths, tickets, **request)
