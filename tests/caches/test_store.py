"""The key/value store: records, drafts over it, rows, memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import MASK, tiny
from torch import Tensor

from paradec import samplers
from paradec.caches.store import KeyValueStore, store_bytes
from paradec.core.checks import check_memory
from paradec.core.query import Query, StoreCall
from paradec.models.adapter import Model

TOPOLOGIES = ["bidirectional", "block_causal"]


def inside_a_block(model: Model, rows: list[list[int]], steps: int = 2, cache: str = "dual", **request: Any) -> Any:
    """A state after `steps` steps of its first block, and its next query."""
    sampler = samplers.create("low_confidence")
    state = sampler.start(model, rows, cache=cache, max_new_tokens=8, block_length=4, eos_early_stop=False, **request)
    with torch.inference_mode():
        for _ in range(steps):
            sampler.commit(state, sampler.step(model, state))
    (query,) = sampler.query(state)
    return state, query


def contents(store: KeyValueStore) -> list[Tensor]:
    layers = [*store.layer_keys.values(), *store.layer_values.values()]
    return [store.token_at_write.clone(), store.step_at_write.clone(), *(layer.clone() for layer in layers)]


def drafts_of(query: Query, count: int) -> Tensor:
    """[count, Q] int64: other tokens at the query's masks."""
    generator = torch.Generator().manual_seed(1)
    tokens = query.tokens[:1].expand(count, -1)
    return torch.where(tokens == MASK, torch.randint(0, 30, tokens.shape, generator=generator), tokens)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_drafts_are_evaluated_as_if_written_and_leave_no_trace(topology: str) -> None:
    """Several rows over one row of the store, against writing each into a copy of its own."""
    model = tiny(3, topology)
    state, query = inside_a_block(model, [[1, 2, 3, 4, 5]])
    drafts = drafts_of(query, 3)
    several = query.but(
        tokens=drafts,
        positions=query.positions.expand(3, -1),
        wanted=None,
        store=query.store.but(rows=query.store.rows.expand(3), slots=None, index=None),
    )
    with torch.inference_mode():
        before = contents(state.store)
        together = model(several, state.store)
        assert all(torch.equal(a, b) for a, b in zip(before, contents(state.store), strict=True))
        for index in range(3):
            one = query.but(tokens=drafts[index : index + 1], wanted=None)
            written = model(one, copy.deepcopy(state.store))
            torch.testing.assert_close(together[index : index + 1], written, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_tree_of_drafts_is_the_drafts_one_by_one(topology: str) -> None:
    """Drafts side by side in one row, each seeing itself and the store, of which only the first is kept."""
    model = tiny(3, topology)
    state, query = inside_a_block(model, [[1, 2, 3, 4, 5]])
    drafts, width = drafts_of(query, 2), query.tokens.shape[1]
    own = torch.block_diag(torch.ones(width, width), torch.ones(width, width)).bool()[None]
    tree = query.but(
        tokens=drafts.reshape(1, -1),
        positions=query.positions.repeat(1, 2),
        wanted=None,
        visible=own,
        store=query.store.but(slots=torch.cat((query.slots, torch.full_like(query.slots, -1)), 1)),
    )
    with torch.inference_mode():
        alone = [model(query.but(tokens=drafts[i : i + 1], wanted=None), copy.deepcopy(state.store)) for i in range(2)]
        together = model(tree, state.store)
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=0, atol=1e-12)
    start, stop = int(state.block_start[0]), int(state.block_end[0])
    if topology == "bidirectional":
        assert torch.equal(state.store.token_at_write[0, start:stop], drafts[0])


def test_guidance_branches_keep_their_own_rows() -> None:
    state, query = inside_a_block(tiny(2), [[1, 2, 3], [4, 5]], guidance_scale=1.5)
    assert state.store.rows == 4 and query.store_rows.tolist() == [0, 1, 2, 3]
    masked = state.store.token_at_write[2:, :2]
    assert (masked == MASK).all() and (state.store.token_at_write[:2, :2] != MASK).all()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_estimate_is_what_is_allocated(dtype: torch.dtype | None) -> None:
    model = tiny(3)
    store = model.make_store(2, 11, None if dtype is None else "bfloat16")
    positions = torch.arange(4).expand(2, 4)
    query = Query(torch.arange(2).numpy(), positions, positions, store=StoreCall(torch.arange(2), positions))
    model(query, store)
    assert store.nbytes == store_bytes(model.module.config, 2, 11, dtype or torch.float64)
    assert next(iter(store.layer_keys.values())).dtype == (dtype or torch.float64)
    store.release()
    assert store.nbytes == 0 and store.peak_bytes > 0 and not store.valid.any()


def test_a_store_beyond_the_machine_is_refused_before_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"would take .* more than this machine's memory .* narrower store_dtype"):
        tiny(1).make_store(10**6, 10**6)
    with pytest.raises(ValueError, match="more than max_memory"):
        check_memory(2048, torch.device("cpu"), 2047, "a store")
    check_memory(2048, torch.device("cpu"), 2048, "a store")
