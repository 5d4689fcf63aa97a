"""Properties that hold for every drafting and verification method on causal language models."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from drafters import decode_answers
from oracles.causal import greedy
from small_models import END, MASK, similar_model, tiny, tiny_llama
from small_models import wrap_causal as causal

import paradec
from paradec import samplers
from paradec.core.protocol import decode
from paradec.models.self_drafting import SelfDrafting
from paradec.samplers.causal.drafts.stopping import Unsure
from paradec.samplers.causal.drafts.text import PromptLookup
from paradec.samplers.causal.loop import CausalSampler
from paradec.samplers.causal.speculative import Speculative

PROMPTS = [[3, 1, 4, 1, 0, 3, 1], [2, 2], [4], [0, 3, 1, 3, 2, 4, 2, 0, 3]]
"""Prompts of different lengths; some contain repetitions, which prompt lookup needs."""
NEGATIVE = [[1, 2, 3], [4], [5, 6, 1, 2, 3, 4, 5, 6, 7, 8], [7, 8, 9, 10]]
"""Negative prompts, of which some are shorter than their prompt and one is longer than every prompt."""


def maker(name: str, **settings: Any) -> Callable[[], CausalSampler]:
    return lambda: samplers.create(name, **settings)


def with_drafter(**settings: Any) -> Callable[[], CausalSampler]:
    return lambda: Speculative(drafter=similar_model(), **settings)


METHODS: dict[str, Callable[[], CausalSampler]] = {
    "sjd": maker("sjd", window=5), "sjd, wide": maker("sjd", window=16), "sjd, token by token": maker("sjd", window=1),
    "sjd, repeat": maker("sjd", window=5, init="repeat_horizontal"),
    "sjd, sample": maker("sjd", window=5, init="sample_horizontal"),
    "sjd, keep": maker("sjd", window=4, refresh="keep"),
    "sjd, one-hot": maker("sjd", window=4, guess_distribution="one_hot"),
    "sjd_pac": maker("sjd_pac", window=4, siblings=3, branching=2), "scd": maker("scd", window=5),
    "scd, maximal": maker("scd", window=5, refresh="maximal"),
    "scd, siblings": maker("scd", window=6, refresh="maximal", siblings=3, branching=2),
    "scd, siblings of noise": maker("scd", window=6, refresh="gumbel", siblings=3, branching=2),
    "jacobi": maker("jacobi", window=5), "jacobi, pool": maker("jacobi", window=6, pool=3),
    "jacobi, blocks": maker("jacobi", group=5),
    "jacobi, blocks as published": maker("jacobi", group=5, early_exit="published"), "speculative": with_drafter(),
    "speculative, wide": with_drafter(window=9), "speculative, tree": with_drafter(tree=(2, 2, 1)),
    "speculative, naive tree": with_drafter(tree=((0,), (1,), (0, 0), (0, 0, 0)), rule="naive"),
    "speculative, greedy tree": with_drafter(tree=(3, 2), rule="greedy"),
    "speculative, k_seq tree": with_drafter(tree=(3, 2), rule="k_seq"),
    "speculative, stopped": with_drafter(window=6, stop=Unsure(0.2)),
    "speculative, lookup": lambda: Speculative(drafter=PromptLookup(5, 2)),
    "speculative, recycling": lambda: Speculative(drafter="token_recycling", rule="naive"),
}  # fmt: skip
SELF_SPECULATIVE = {
    "self_speculative, causal": ("causal", "shifted"),
    "self_speculative": ("block_causal", "same"),
    "self_speculative, shifted": ("block_causal", "shifted"),
}
"""Self-speculative method -> (topology, prediction) of its model."""
ALL_METHODS = [*METHODS, *SELF_SPECULATIVE]


@cache
def create_sampler_and_model(name: str) -> tuple[CausalSampler, Any]:
    if name not in SELF_SPECULATIVE:
        return METHODS[name](), causal()
    topology, prediction = SELF_SPECULATIVE[name]
    if topology == "block_causal":
        return samplers.create("self_speculative", rule="match"), tiny(2, topology, prediction)
    facts = {"topology": topology, "prediction": prediction, "eos_token_id": END, "mask_token_id": MASK}
    model = paradec.wrap(tiny(2).unwrap(), **facts)
    model.self_drafting = SelfDrafting(4)
    return samplers.create("self_speculative"), model


@pytest.mark.thinned
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("name", METHODS)
def test_temperature_0_equals_greedy_decoding_token_by_token(name: str, scale: float) -> None:
    sampler, model = create_sampler_and_model(name)
    request = {"guidance_scale": scale, "negative_prompt": NEGATIVE} if scale != 1 else {}
    expected = greedy(model.module, PROMPTS, 11, scale, NEGATIVE)
    for new in (1, 2, 11):
        tokens, state = decode_answers(sampler, model, PROMPTS, max_new_tokens=new, temperature=0, seed=0, **request)
        assert tokens == [answer[:new] for answer in expected]
    assert (state.nfe <= (23 if sampler.name == "jacobi" else 11)).all()
    assert (state.row_forwards == state.nfe * (1 if scale == 1 else 2)).all()
    assert np.sum(state.accepted, 0).tolist() == [11] * 4
    if name == "sjd, token by token":
        assert (state.nfe == 11).all()
    if name.startswith("speculative") and state.draft_nfe.any() and scale == 1 and sampler.stop is None:
        assert (state.nfe < 11).all() and (state.draft_nfe > 0).all()


@pytest.mark.thinned
@pytest.mark.parametrize("name", ALL_METHODS)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    sampler, model = create_sampler_and_model(name)
    request: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "logprobs": 2}
    together = paradec.generate(model, PROMPTS, sampler=sampler, seed=[5, 6, 7, 8], **request)
    prompts = [{"prompt": prompt, "seed": 5 + row} for row, prompt in enumerate(PROMPTS)]
    for output in paradec.generate_many(model, prompts, batch_size=2, sampler=sampler, **request):
        row = output.index
        alone = paradec.generate(model, [PROMPTS[row]], sampler=sampler, seed=5 + row, **request)
        assert output.new_tokens.tolist() == alone.new_tokens.tolist() == [together.new_tokens[row].tolist()]
        assert output.row_nfe == alone.row_nfe == [together.row_nfe[row]]
        if "tree" not in name and "recycling" not in name:  # trees are drafted as deep as the longest row needs
            assert output.draft_nfe == alone.draft_nfe == (together.draft_nfe and [together.draft_nfe[row]])
    is_generated = ~together.logprobs.chosen.isnan()
    assert is_generated.sum() == sum(together.tokens) and (together.logprobs.chosen[is_generated] <= 0).all()


@pytest.mark.thinned
@pytest.mark.parametrize("name", ALL_METHODS)
def test_steps_have_no_side_effects_and_copies_decode_alike(name: str) -> None:
    sampler, model = create_sampler_and_model(name)
    state = sampler.start(model, PROMPTS, max_new_tokens=10, seed=4, temperature=0.8, eos_early_stop=False)
    with torch.inference_mode():
        while not state.done:
            before = [state.canvas.clone(), *(tensor.clone() for tensor in state.memory.tensors.values())]
            first, second = sampler.step(model, state), sampler.step(model, state)
            assert torch.equal(first.values, second.values) and torch.equal(first.scores, second.scores)
            for quantity, value in first.quantities.items():
                assert torch.equal(value, second.quantities[quantity]), quantity
            assert all(map(torch.equal, before, [state.canvas, *state.memory.tensors.values()]))
            copied_state, committed = pickle.loads(pickle.dumps(copy.deepcopy(state))), state.committed.copy()
            sampler.commit(state, second)
            sampler.commit(copied_state, sampler.step(model, copied_state))
            assert torch.equal(state.canvas, copied_state.canvas)
            assert all(torch.equal(tensor, copied_state.memory[key]) for key, tensor in state.memory.tensors.items())
            num_committed = state.committed - committed
            assert (num_committed == state.accepted[-1]).all()
            assert (num_committed[first.rows] >= (sampler.name != "jacobi")).all()
            with pytest.raises(ValueError, match="earlier state"):
                sampler.commit(state, first)
    assert state.progress == (40, 40)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_traces_contain_every_token_once_and_give_the_final_rows(name: str) -> None:
    sampler, model = create_sampler_and_model(name)
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5, trace=True, eos_early_stop=False)
    decode(sampler, model, state)
    final = [row[:stop] for row, stop in zip(state.canvas.tolist(), state.length, strict=True)]
    assert state.trace.replay() == final and len(state.trace.steps) == state.nfe.max()
    committed = [entry[:2] for step in state.trace.steps for entry in step.commits]
    assert len(committed) == len(set(committed)) == 36
    rejected = [(step, *entry[:3]) for step, record in enumerate(state.trace.steps) for entry in record.rejected or ()]
    assert len(rejected) == len(set(rejected))


@pytest.mark.parametrize("name", ALL_METHODS)
def test_nan_logits_raise_an_error_and_change_no_state(name: str) -> None:
    sampler, model = copy.deepcopy(create_sampler_and_model(name))
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5)
    before = state.canvas.clone()
    model.module.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="row 0 at its step 0"):
        decode(sampler, model, state)
    assert torch.equal(state.canvas, before) and not state.nfe.any()


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
def test_generate_stops_rows_at_the_end_token(name: str) -> None:
    sampler, _ = create_sampler_and_model(name)
    module = tiny_llama()
    expected = greedy(module, PROMPTS, 11)
    end = expected[0][3]
    model = causal(module, eos_token_id=end)
    out = paradec.generate(model, input_ids=PROMPTS, sampler=sampler, max_new_tokens=11)
    assert out.finished[0] and not all(out.finished)
    for row, answer in enumerate(expected):
        answer = answer[: answer.index(end) + 1] if end in answer else answer
        assert out.new_tokens[row, : len(answer)].tolist() == answer
        assert (out.new_tokens[row, len(answer) :] == end).all()
        assert out.tokens[row] == len(answer) and out.finished[row] == (answer[-1] == end)
    longer = paradec.generate(model, input_ids=PROMPTS, sampler=sampler, max_new_tokens=11, eos_early_stop=False)
    assert longer.new_tokens.tolist() == expected
