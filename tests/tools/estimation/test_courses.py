"""Which positions an estimate says that steps evaluate, beside what decoding evaluates, for every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import MASK, tiny

import paradec
from paradec.caches.table import REFUSED, verdict
from paradec.models.adapter import Model
from paradec.tools.estimation.courses import causal_course, masked_course
from paradec.tools.estimation.shapes import shape_of

PROMPT, ANSWER = [7, 8, 9, 10, 11, 12], 16
ALIGNED = [7, 8, 9, 10, 11, 12, 13, 14]
"""Whole blocks of a block-causal model: where a prompt ends inside one, `steps` have no even plan."""
KINDS = [("bidirectional", "same"), ("bidirectional", "shifted"), ("block_causal", "same"), ("block_causal", "shifted")]
ANY_ORDER = ("dkv_greedy", "d2")
"""Caches whose steps depend on which positions are decided, not on how many."""


def decoded(model: Model, prompt: list[int], cache: Any, steps: int, block: int) -> paradec.Output:
    """A request whose steps decide as many tokens each as they can be spread evenly."""
    return paradec.generate(
        model,
        [prompt],
        sampler="random",
        cache=cache,
        steps=steps,
        block_length=block,
        max_new_tokens=ANSWER,
        eos_early_stop=False,
        seed=3,
    )


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("name", [*paradec.caches.names()])
def test_courses_are_what_decoding_evaluates(name: str, kind: tuple[str, str]) -> None:
    model, cache = tiny(2, *kind), paradec.caches.create(name)
    if verdict(paradec.samplers.get("random"), cache, model.facts).status == REFUSED:
        with pytest.raises(ValueError, match=f"cache={name!r} does not work with"):
            paradec.estimate(model, cache=name, dtype="float32", prompt=6, answer=16)
        return
    prompt, block = ALIGNED if kind[0] == "block_causal" else PROMPT, 4
    for steps in (16, 8, 4):
        found = masked_course(shape_of(model), cache, None, len(prompt), ANSWER, block, ANSWER / steps)
        cost = decoded(model, prompt, cache, steps, block).cost
        assert cost is not None
        forwards = sum(found.values())
        whole = sum(count for each, count in found.items() if each.kind == "whole")
        positions = sum(each.positions * count for each, count in found.items())
        assert forwards == cost.full_forwards[0] + cost.partial_forwards[0], name
        if (name.startswith("dkv") and kind[1] == "shifted") or name in ANY_ORDER:
            assert positions == pytest.approx(cost.forwarded_tokens[0], rel=0.2), name
        else:
            assert positions == cost.forwarded_tokens[0], name
        if name not in ("block", "hierarchical"):  # a part may happen to be all that there is
            assert whole >= cost.full_forwards[0]


def test_settings_of_a_cache_count() -> None:
    shape = shape_of(tiny(2))
    plans = [paradec.caches.create("vicinity", warmup_steps=0, prefix_look=look, after_look=look) for look in (0, 2)]
    near, wide = (masked_course(shape, plan, None, 32, 16, 4, 1) for plan in plans)
    assert {each.positions for each in near} == {4, 48} and {each.positions for each in wide} == {6, 8, 48}


def test_keys_seen_and_logits_wanted() -> None:
    dense = masked_course(shape_of(tiny(2)), paradec.caches.create("dual"), None, 6, 8, 4, 1)
    assert {(e.kind, e.positions, e.wanted, e.seen) for e in dense} == {("whole", 14, 4, 14), ("part", 4, 4, 14)}
    blocks = masked_course(shape_of(tiny(2, "block_causal")), paradec.caches.create("block"), None, 8, 8, 4, 1)
    # the prompt and the first block; that block; it once more, full, beside the second; the second alone
    assert {(e.positions, e.wanted, e.seen) for e in blocks} == {(12, 4, 12), (4, 4, 12), (8, 4, 16), (4, 4, 16)}


@pytest.mark.parametrize("accepted", [1, 1.5, 2.45, 3, 4])
def test_answers_take_as_many_steps_as_their_tokens_say(accepted: float) -> None:
    found = masked_course(shape_of(tiny(2)), paradec.caches.create("dual"), None, 5, 400, 4, accepted)
    # a block takes whole steps: between 400 / 4 blocks of one step and 400 of a token each
    assert sum(found.values()) == pytest.approx(400 / accepted, abs=1)
    assert sum(count for each, count in found.items() if each.kind == "whole") == 100
    # a block of one token takes a step of its own, however many a step decides elsewhere
    short = masked_course(shape_of(tiny(2)), paradec.caches.create("dual"), None, 5, 9, 4, 4)
    assert sum(short.values()) == 3


@pytest.mark.parametrize("settings", [{}, {"select": 0.5, "block_size": 4, "skip": 0.5}, {"dense_steps": 3}])
@pytest.mark.parametrize("cache", ["none", "dual"])
def test_sparse_steps_are_those_of_decoding(cache: str, settings: dict[str, Any]) -> None:
    model, method = tiny(2), paradec.attention.create("sparsed", **{"block_size": 4} | settings)
    # a sampler without a schedule, whose steps decide a token each
    out = paradec.generate(
        model,
        [PROMPT],
        sampler=paradec.samplers.create("threshold", threshold=1.0),
        cache=cache,
        block_length=4,
        max_new_tokens=ANSWER,
        eos_early_stop=False,
        attention=method,
    )
    assert out.attention is not None and out.row_nfe == [ANSWER]
    found = masked_course(shape_of(model), paradec.caches.create(cache), method, len(PROMPT), ANSWER, 4, 1)
    sparse = sum(count for each, count in found.items() if each.share < 1)
    assert sparse == out.attention.sparse_calls[0]
    (share,) = {each.share for each in found} - {1.0}
    assert share == pytest.approx(out.attention.density[0])


def test_causal_models_verify_drafts_over_the_prompt() -> None:
    """The prompt's forward, then one for every `tokens_per_forward` tokens, each over one more stretch of keys."""
    found = causal_course(prompt=10, answer=9, drafted=4, tokens_per_forward=2)
    assert [(each.positions, each.seen) for each in found.elements()] == [(10, 10), (4, 14), (4, 16), (4, 18), (4, 20)]
    assert sum(causal_course(5, 1, 1, 1).values()) == 1


def test_following_changes_no_numbers_of_the_caller() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    masked_course(shape_of("LLaDA-8B"), paradec.caches.create("dkv_greedy"), None, 64, 64, 32, 2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("longest", "forwards"), [(512, 18), (23, 17)])
@pytest.mark.parametrize("name", ["none", "block", "hierarchical", "dual", "prefix", "vicinity", "dkv_prefill"])
def test_prompts_may_end_inside_a_block(name: str, longest: int, forwards: int) -> None:
    """Of a block-causal model, whose blocks count from 0; a sampler without a schedule decides a token a step."""
    facts = {"mask_token_id": MASK, "eos_token_id": (), "topology": "block_causal", "block_length": 4}
    model = paradec.wrap(tiny(2).module, prediction="same", max_length=longest, **facts)
    cache = paradec.caches.create(name)
    out = paradec.generate(
        model,
        [PROMPT],
        sampler=paradec.samplers.create("threshold", threshold=1.0),
        cache=cache,
        max_new_tokens=ANSWER,
        eos_early_stop=False,
    )
    assert out.cost is not None
    said = paradec.estimate(model, cache=cache, prompt=len(PROMPT), answer=ANSWER, dtype="float32")
    positions = sum(step.positions * step.count for step in said.steps)
    # two positions more fill the last block, where the model takes so many
    assert (said.forwards, positions) == (out.nfe, pytest.approx(out.cost.forwarded_tokens[0])) and out.nfe == forwards
    assert said.memory.store == (0 if name == "none" else out.cost.store_bytes / 2)  # float64 there
