"""Invariants that every masked sampler with every cache must keep, in float64. New registry entries are covered here
without a test of their own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paradec
from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.models.adapter import Model
from paradec.models.facts import ModelFacts
from paradec.protocol import Proposal, Sampler
from paradec.samplers.masked_state import MaskedState

MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
BIDIRECTIONAL = [name for name in caches.names() if "bidirectional" in caches.get(name).topologies]


def pairs() -> list[tuple[str, str, str]]:
    """(sampler, cache, model): every sampler without a cache on both models, and with one of the caches that it works
    with, in turn, on one of them."""
    models = {"llada64": "same", "dream64": "shifted"}
    found = [(name, "none", model) for model in models for name in MASKED if works(name, "none", models[model])]
    for index, sampler in enumerate(MASKED):
        model = [model for model in models if works(sampler, "none", models[model])][-(index % 2)]
        fitting = [name for name in BIDIRECTIONAL[1:] if works(sampler, name, models[model])]
        found.append((sampler, fitting[index // 2 % len(fitting)], model))
    return [*found, ("random", "dkv_greedy", "llada64"), ("threshold", "dkv_decode", "dream64")]


def works(sampler: str, cache: str, prediction: str) -> bool:
    facts = ModelFacts(vocab_size=2, prediction=prediction)
    return verdict(samplers.get(sampler), caches.create(cache), facts).status != REFUSED


PAIRS = pairs()
pytestmark = pytest.mark.filterwarnings("ignore:cache=")
NEW = 12

FEW = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
prompts = st.lists(st.lists(st.integers(0, 35), min_size=1, max_size=9), min_size=1, max_size=3)
requests = st.fixed_dictionaries(
    {
        "block_length": st.sampled_from([3, 4, 12]),
        "temperature": st.sampled_from([0.0, 0.8]),
        "guidance_scale": st.sampled_from([1.0, 1.0, 1.5]),
        "seed": st.integers(0, 2**31),
        "eos_early_stop": st.booleans(),
    }
)


@pytest.fixture(params=["llada64", "dream64"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def tensors_of(state: MaskedState) -> dict[str, torch.Tensor]:
    found = {"canvas": state.canvas, "undecided": state.undecided, **state.memory.tensors}
    return {name: tensor.clone() for name, tensor in found.items()}


def numbers_of(state: MaskedState) -> dict[str, list]:
    return {name: value.tolist() for name, value in vars(state).items() if isinstance(value, np.ndarray)}


def assert_same_proposal(a: Proposal, b: Proposal) -> None:
    for name in ("values", "positions", "scores", "available"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.quantities.keys() == b.quantities.keys()
    assert all(torch.equal(a.quantities[name], b.quantities[name]) for name in a.quantities)
    assert (a.cost.nfe == b.cost.nfe).all()


@pytest.mark.parametrize(("name", "cache", "model"), PAIRS, indirect=["model"])
@FEW
@given(rows=prompts, request=requests)
def test_every_step(name: str, cache: str, model: Model, rows: list[list[int]], request: dict) -> None:
    """A step repeated equals the step and changes nothing; a commit fills only undecided positions, makes progress,
    never writes the mask; and the number of steps is bounded. Methods that revise write to the open block alone, never
    to what was given, and keep to their own bound."""
    sampler = samplers.create(name)
    state = sampler.start(model, rows, max_new_tokens=NEW, cache=cache, **request)
    mask = model.facts.mask_token_id
    steps, most = 0, NEW
    if sampler.revises:
        blocks = np.full(NEW // request["block_length"], request["block_length"])
        most = sampler.most_steps(blocks).sum()
    with torch.inference_mode():
        while not state.done:
            before, numbers = tensors_of(state), numbers_of(state)
            proposal, again = sampler.step(model, state), sampler.step(model, state)
            assert_same_proposal(proposal, again)
            assert all(torch.equal(tensor, before[key]) for key, tensor in tensors_of(state).items())
            assert numbers_of(state) == numbers
            running, start, end = state.running.copy(), state.block_start.copy(), state.block_end.copy()
            commit = sampler.commit(state, again)
            entries = commit.to_list()
            written = torch.zeros_like(before["undecided"])
            for row, position, token, _ in entries:
                if sampler.revises:
                    assert start[row] <= position < end[row] and not state.given[row, position] and running[row]
                    assert before["undecided"][row, position] or token != before["canvas"][row, position]
                    assert not (before["undecided"][row, position] and token == mask)
                else:
                    assert before["undecided"][row, position] and token != mask and running[row]
                assert state.canvas[row, position] == token or state.facts.fill_token_id == state.canvas[row, position]
                written[row, position] = True
            outside = ~written & (state.canvas != before["canvas"])
            # what changed without being committed is padding after an end of text
            assert (state.canvas[outside] == state.facts.fill_token_id).all()
            opened = state.undecided & ~before["undecided"]
            assert not (opened & ~written if sampler.revises else opened).any()
            if not sampler.may_wait and not sampler.revises:
                assert {row for row, *_ in entries} == set(np.flatnonzero(running).tolist())
            steps += 1
            assert steps <= most
    assert not state.undecided.any()
    for row, prompt in enumerate(rows):
        assert state.canvas[row, : len(prompt)].tolist() == prompt
    assert (state.nfe <= most).all()
    assert state.progress[0] == state.progress[1] == NEW * len(rows)


@pytest.mark.parametrize(("name", "cache", "model"), PAIRS, indirect=["model"])
@FEW
@given(rows=prompts, request=requests)
def test_batch_equals_rows_alone(name: str, cache: str, model: Model, rows: list[list[int]], request: dict) -> None:
    """A row's tokens, forwards and commits do not depend on its neighbours (which are unequal in length)."""
    rows = [row for i, row in enumerate(rows) if row not in rows[:i]]  # copies of a prompt draw different numbers
    arguments = {"sampler": name, "cache": cache, "max_new_tokens": NEW, "trace": True, **request}
    together = paradec.generate(model, rows, **arguments)
    for index, row in enumerate(rows):
        alone = paradec.generate(model, [row], **arguments)
        assert together.new_tokens[index].tolist() == alone.new_tokens[0].tolist()
        assert together.row_nfe[index] == alone.nfe
        assert together.tokens[index] == alone.tokens[0]
        ours = [[c[1:3] for c in step.commits if c[0] == index] for step in together.trace.steps]
        theirs = [[c[1:3] for c in step.commits] for step in alone.trace.steps]
        assert ours[: len(theirs)] == theirs and not any(ours[len(theirs) :])
        forwarded = sum(step.forwarded[index] for step in together.trace.steps)
        assert forwarded == alone.forwarded_tokens


@pytest.mark.parametrize("name", MASKED)
def test_same_seed_same_result(name: str, llada64: Model) -> None:
    arguments = {"sampler": name, "max_new_tokens": NEW, "temperature": 4.0, "eos_early_stop": False}
    first = paradec.generate(llada64, [1, 2, 3], seed=5, **arguments)
    again = paradec.generate(llada64, [1, 2, 3], seed=5, **arguments)
    assert torch.equal(first.sequences, again.sequences) and first.row_nfe == again.row_nfe
    others = [paradec.generate(llada64, [1, 2, 3], seed=seed, **arguments).sequences for seed in range(6, 10)]
    assert any(not torch.equal(first.sequences, other) for other in others)


@pytest.mark.parametrize("name", MASKED)
def test_copies_of_a_prompt_draw_their_own_numbers(name: str, llada64: Model) -> None:
    out = paradec.generate(llada64, [[1, 2, 3]] * 6, sampler=name, max_new_tokens=NEW, temperature=4.0, seed=0)
    assert len({tuple(row) for row in out.new_tokens.tolist()}) > 1


@pytest.mark.parametrize("name", MASKED)
def test_trace_replays_to_the_output(name: str, llada64: Model) -> None:
    rows = [[1, 2, 3], [4, 5]]
    out = paradec.generate(llada64, rows, sampler=name, max_new_tokens=NEW, eos_early_stop=False, trace=True)
    for index, row in enumerate(out.trace.replay()):
        assert row[-NEW:] == out.new_tokens[index].tolist()
    assert out.nfe == max(sum(step.forwarded[r] > 0 for step in out.trace.steps) for r in range(2))
    assert sum(sum(step.forwarded) for step in out.trace.steps) == out.forwarded_tokens


UNBOUNDED = {"klass", "persistence"}
"""What is ready, or may end, decides; the schedule says only how many there are where nothing is. See their docs."""
AHEAD = UNBOUNDED | {"ccd", "ccd_agree"}
"""May commit more than the schedule grants."""


@pytest.mark.parametrize("name", [n for n in MASKED if samplers.get(n).uses_steps is True])
@pytest.mark.parametrize("steps", [2, 4, 6])
def test_steps_bound_the_forwards(name: str, steps: int, model: Model) -> None:
    out = paradec.generate(
        model,
        [1, 2, 3],
        sampler=name,
        max_new_tokens=NEW,
        steps=steps,
        block_length=NEW // 2,
        eos_early_stop=False,
        seed=1,
    )
    if name not in UNBOUNDED:
        assert out.nfe <= steps
    if not samplers.get(name).may_wait and name not in AHEAD:
        assert out.nfe == steps


def test_a_proposal_is_good_for_one_commit(llada64: Model) -> None:
    sampler = samplers.create("threshold")
    state = sampler.start(llada64, [1, 2, 3], max_new_tokens=NEW)
    proposal = sampler.step(llada64, state)
    sampler.commit(state, proposal)
    with pytest.raises(ValueError, match="made from an earlier state"):
        sampler.commit(state, proposal)


def test_query_and_propose_are_step(llada64: Model) -> None:
    """A host that owns the model call gets the same as `step`."""
    sampler = samplers.create("threshold")
    state = sampler.start(llada64, [[1, 2, 3], [4]], max_new_tokens=NEW)
    with torch.inference_mode():
        queries = sampler.query(state)
        by_hand = sampler.propose(state, [llada64(query) for query in queries], queries)
        assert_same_proposal(by_hand, sampler.step(llada64, state))


def test_rows_far_apart_in_length_are_not_padded_to_the_longest(llada64: Model) -> None:
    sampler = samplers.create("threshold")
    state = sampler.start(llada64, [[1] * 2, [2] * 60, [3] * 3], max_new_tokens=4)
    queries = sampler.query(state)
    assert [query.tokens.shape for query in queries] == [(1, 64), (2, 7)]
    assert sorted(np.concatenate([query.rows for query in queries]).tolist()) == [0, 1, 2]


def test_guidance_costs_two_row_forwards_and_one_nfe(llada64: Model) -> None:
    arguments = {"sampler": "low_confidence", "max_new_tokens": NEW, "steps": 4, "block_length": NEW}
    plain = paradec.generate(llada64, [1, 2, 3], eos_early_stop=False, **arguments)
    guided = paradec.generate(llada64, [1, 2, 3], eos_early_stop=False, guidance_scale=2.0, **arguments)
    assert plain.nfe == guided.nfe == 4
    assert guided.row_forwards == 2 * plain.row_forwards == 8
    assert guided.forwarded_tokens == 2 * plain.forwarded_tokens


def test_guidance_formula(llada64: Model) -> None:
    """uncond + s (cond - uncond), uncond being the same canvas with the prompt masked."""
    sampler = samplers.create("threshold")
    state = sampler.start(llada64, [1, 2, 3], max_new_tokens=4, block_length=4, guidance_scale=1.7)
    canvas = state.canvas.clone()
    masked = canvas.clone()
    masked[:, :3] = llada64.facts.mask_token_id
    with torch.inference_mode():
        conditional, unconditional = (llada64.module(input_ids=ids, use_cache=False).logits for ids in (canvas, masked))
        expected = unconditional + 1.7 * (conditional - unconditional)
        expected[..., llada64.facts.mask_token_id] = -torch.inf
        proposal = sampler.step(llada64, state)
    probabilities = expected[:, 3:].softmax(-1)
    assert torch.equal(proposal.values, probabilities.argmax(-1))
    torch.testing.assert_close(proposal.scores, probabilities.amax(-1), rtol=1e-9, atol=1e-12)


def test_threshold_limits(model: Model) -> None:
    """At 0 a block is one step; at 1 it is one token a step, as low_confidence without steps."""
    arguments = {"max_new_tokens": NEW, "block_length": 4, "eos_early_stop": False}
    everything = paradec.generate(model, [1, 2, 3], sampler=samplers.create("threshold", threshold=0.0), **arguments)
    assert everything.nfe == 3
    one = paradec.generate(model, [1, 2, 3], sampler=samplers.create("threshold", threshold=1.0), **arguments)
    low = paradec.generate(model, [1, 2, 3], sampler="low_confidence", **arguments)
    assert one.nfe == low.nfe == NEW
    assert torch.equal(one.sequences, low.sequences)


def test_suppressed_words_are_never_proposed(model: Model) -> None:
    free = paradec.generate(model, [1, 2, 3], max_new_tokens=NEW, eos_early_stop=False)
    banned = sorted(set(free.new_tokens[0].tolist()))
    out = paradec.generate(model, [1, 2, 3], max_new_tokens=NEW, suppress_tokens=banned, temperature=1.0, seed=0)
    assert not set(out.new_tokens[0, : out.tokens[0]].tolist()) & set(banned)


def test_logits_eos_inf_proposes_no_end(model: Model) -> None:
    out = paradec.generate(model, [1, 2, 3], max_new_tokens=NEW, logits_eos_inf=True)
    assert not set(out.new_tokens[0].tolist()) & set(model.facts.eos_token_ids)
    assert out.tokens == [NEW] and out.finished == [False]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_confidence_eos_eot_inf_commits_ends_last(model: Model, temperature: float) -> None:
    """While a position has another candidate, no end token is committed; at every temperature and for every end id."""
    sampler = samplers.create("low_confidence")
    state = sampler.start(
        model,
        [1, 2, 3],
        max_new_tokens=NEW,
        block_length=NEW,
        confidence_eos_eot_inf=True,
        temperature=temperature,
        seed=3,
    )
    with torch.inference_mode():
        while not state.done:
            proposal = sampler.step(model, state)
            ends = torch.isin(proposal.values, torch.tensor(model.facts.eos_token_ids))
            others = (proposal.available & ~ends).any()
            commit = sampler.commit(state, proposal)
            if others:
                assert not (commit.selected & ends).any()


def test_eos_early_stop_is_per_row_and_counts_no_padding(llada64: Model) -> None:
    rows = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [1, 2]]
    stopped = paradec.generate(llada64, rows, max_new_tokens=32, block_length=8)
    whole = paradec.generate(llada64, rows, max_new_tokens=32, block_length=8, eos_early_stop=False)
    end = llada64.facts.eos_token_ids[0]
    for index in range(len(rows)):
        assert stopped.row_nfe[index] <= whole.row_nfe[index]
        if not stopped.finished[index]:
            continue
        count = stopped.tokens[index]
        answer = stopped.new_tokens[index].tolist()
        assert answer.index(end) == count - 1
        assert answer[count:] == [llada64.facts.fill_token_id] * (32 - count)
        # everything up to the end is what the full decoding has
        assert answer[:count] == whole.new_tokens[index, :count].tolist()
    assert any(stopped.finished) and sum(stopped.row_nfe) < sum(whole.row_nfe)
    assert stopped.tokens_per_forward == sum(stopped.tokens) / sum(stopped.row_nfe)


def test_left_and_right_padding_and_lists_are_the_same(model: Model) -> None:
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    left = torch.tensor([[1, 2, 3, 4, 5], [9, 9, 9, 6, 7]])
    right = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]])
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    as_list = paradec.generate(model, rows, max_new_tokens=NEW)
    as_left = paradec.generate(model, input_ids=left, attention_mask=keep, max_new_tokens=NEW)
    as_right = paradec.generate(model, input_ids=right, attention_mask=keep.flip(1), max_new_tokens=NEW)
    assert torch.equal(as_list.sequences, as_left.sequences) and torch.equal(as_list.sequences, as_right.sequences)
    assert torch.equal(as_left.sequences[:, 5:], as_left.new_tokens)
    assert as_left.attention_mask.tolist() == [[1] * (5 + NEW), [0] * 3 + [1] * (2 + NEW)]


def test_callback_ends_the_decoding_and_nothing_is_lost(llada64: Model) -> None:
    seen = []

    def callback(state: MaskedState, commit: object) -> bool:
        seen.append(state.progress)
        return len(seen) == 3

    out = paradec.generate(llada64, [1, 2, 3], sampler="low_confidence", max_new_tokens=NEW, callback=callback)
    assert seen == [(1, NEW), (2, NEW), (3, NEW)] and out.nfe == 3
    mask = llada64.facts.mask_token_id
    assert (out.new_tokens == mask).sum() == NEW - 3


def test_interrupt_keeps_what_was_decoded(llada64: Model) -> None:
    def callback(state: MaskedState, commit: object) -> None:
        if state.progress[0] == 4:
            raise KeyboardInterrupt

    with pytest.raises(paradec.Interrupted) as caught:
        paradec.generate(
            llada64, [1, 2, 3], sampler="low_confidence", max_new_tokens=NEW, callback=callback, trace=True
        )
    out = caught.value.output
    assert out.nfe == 4 and len(out.trace.steps) == 4
    assert (out.new_tokens != llada64.facts.mask_token_id).sum() == 4


def test_two_requests_share_one_sampler(llada64: Model) -> None:
    sampler = samplers.create("threshold", threshold=0.7)
    before = copy.deepcopy(sampler.to_dict())
    a = paradec.generate(llada64, [1, 2], sampler=sampler, max_new_tokens=NEW)
    paradec.generate(llada64, [9, 8, 7], sampler=sampler, max_new_tokens=NEW)
    assert torch.equal(a.sequences, paradec.generate(llada64, [1, 2], sampler=sampler, max_new_tokens=NEW).sequences)
    assert sampler.to_dict() == before and isinstance(sampler, Sampler)
