"""What every way of drafting keeps over a store: rows are what they are alone, steps repeat, copies go on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_drafters import answers, tiny_base

import paradec
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.causal.drafts.text import PromptLookup, TokenRecycling
from paradec.samplers.causal.jacobi import Jacobi
from paradec.samplers.causal.loop import CausalSampler
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.speculative import Speculative

PROMPTS = [[3, 1, 4, 1, 0, 3, 1], [2, 2], [4], [0, 3, 1, 3, 2, 4, 2, 0, 3]]
"""Unequal, and some repeat themselves, so that there is something to look up."""
METHODS: dict[str, Callable[[], CausalSampler]] = {
    "pool": lambda: Jacobi(window=6, pool=3),
    "lookup": lambda: Speculative(drafter=PromptLookup(5, 2)),
    "recycling": lambda: Speculative(drafter=TokenRecycling(k=8, tree=(4, 2, 1)), rule="naive"),
    "siblings": lambda: SCD(window=6, refresh="maximal", siblings=3, branching=2),
    "siblings of noise": lambda: SCD(window=6, refresh="gumbel", siblings=3, branching=2),
    "stopped drafts": lambda: Speculative(drafter=tiny_base(seed=4), window=6, stop=Unsure(0.2)),
}
GIVEN: dict[str, Any] = {"max_new_tokens": 14, "temperature": 0.8}


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_what_it_is_alone(name: str) -> None:
    base, method = tiny_base(), METHODS[name]()
    together, whole = answers(method, base, PROMPTS, seed=[5, 6, 7, 8], **GIVEN)
    for row, prompt in enumerate(PROMPTS):
        alone, state = answers(method, base, prompt, seed=5 + row, **GIVEN)
        assert alone == [together[row]]
        assert (state.nfe[0], state.draft_nfe[0]) == (whole.nfe[row], whole.draft_nfe[row])
    prompts = [{"prompt": prompt, "seed": 5 + row} for row, prompt in enumerate(PROMPTS)]
    every = [*paradec.generate_many(base, prompts, batch_size=2, sampler=method, **GIVEN)]
    assert [out.new_tokens[0].tolist() for out in every] == together
    assert [out.row_nfe[0] for out in every] == whole.nfe.tolist()


@pytest.mark.parametrize("name", METHODS)
def test_steps_repeat_and_copies_go_on(name: str) -> None:
    base, method = tiny_base(), METHODS[name]()
    state = method.start(base, PROMPTS, seed=1, **GIVEN)
    while not state.done:
        one, two = method.step(base, state), method.step(base, state)
        assert torch.equal(one.values, two.values)
        for quantity, value in one.quantities.items():
            assert torch.equal(value, two.quantities[quantity]), quantity
        other = pickle.loads(pickle.dumps(copy.deepcopy(state)))
        method.commit(state, one)
        method.commit(other, method.step(base, other))
        assert torch.equal(state.canvas, other.canvas)
        assert all(torch.equal(tensor, other.memory[key]) for key, tensor in state.memory.tensors.items())
        with pytest.raises(ValueError, match="earlier state"):
            method.commit(state, two)


@pytest.mark.parametrize("name", ["pool", "recycling", "siblings"])
def test_models_without_a_store_are_refused(name: str) -> None:
    base = tiny_base()
    base.module.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="needs (a model|models) that runs? over a store; LlamaForCausalLM does not"):
        METHODS[name]().start(base, [1, 2], max_new_tokens=4)
